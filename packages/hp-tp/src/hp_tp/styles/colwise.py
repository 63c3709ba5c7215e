"""``ColwiseParallel``: every rank computes some of the features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hp_dtensor import Placement, Replicate, Shard
from hp_platform import get_platform
from hp_tp.overlap.at_doors import linear_of_whole
from hp_tp.overlap.policy import OverlapPolicy
from hp_tp.styles import put_off
from hp_tp.styles.collectives import (
    Collectives,
    itemsize_of,
    of_move,
    of_operations,
    of_parameters,
    of_sizes,
    of_whole_input,
)
from hp_tp.styles.cuts import BY_COLUMNS, ModuleCuts
from hp_tp.styles.cutting import CuttingStyle, check_flag
from hp_tp.styles.door import Door
from hp_tp.styles.entrance import as_dtensor, enter_piece, enter_whole, first_argument
from hp_tp.styles.exits import leave, leave_piece
from hp_tp.styles.parts import Part, Wishes, given, parts_of, place_parts, shown
from hp_tp.styles.placing import local_of, run_with

Tensor = Any
Module = Any


class ColwiseParallel(CuttingStyle):
    """Cut a layer by the features that it gives: every rank computes some columns of the result.

    Of ``y = x @ weight.T + bias`` with ``x (..., in)`` every rank holds ``weight (out / ranks, in)`` and ``bias (out / ranks,)``
    as DTensors Shard(0), and gives ``y (..., out / ranks)``. Of an Embedding with ``weight (num, dim)`` it is Shard(1); of a
    convolution the channels that come out; of other modules what they say (:class:`hp_tp.ModuleCuts`). Sizes that do not
    divide are cut by the chunk rule of hp_dtensor, the last pieces short or empty.

    Args:
        input_layouts: how a plain input lies; default Replicate(). A DTensor knows it itself. Forward needs it whole.
        output_layouts: how the result shall lie; default: cut along the features, Shard(-1) for Linear.
        use_local_output: whether the result is handed out as this rank's plain piece (default) or as a DTensor.
        heads: number of attention heads that the features are made of. They must divide over the ranks.
        replicate_kv: for projections to keys and values whose heads do not divide over the ranks: the parameters stay whole on
            every rank, which computes the heads that its queries need; see [Note: replicated keys and values] in
            :mod:`hp_tp.styles.heads`. Gradients of the parameters are added up: one all-reduce each, in backward. The
            attention must take the number of heads from the tensors. Where the heads divide they are cut as usual.
        query_heads: number of heads of the queries; needed for replicate_kv.
        parts: the features in parts that are each cut for themselves, for fused projections: sizes by name, such as ``{"q":
            4096, "k": 1024, "v": 1024}``, or a list of sizes. A parameter ``weight`` becomes ``weight_q``, ``weight_k`` and
            ``weight_v``, see [Note: fused parameters] in :mod:`hp_tp.styles.parts`, and the result is this rank's
            piece of q, of k and of v. ``heads`` is a dict by part then.
        cuts: how the module is cut, if it is of another kind and does not say so itself.
        uneven: whether plain pieces of an input may be of several sizes, and plain results too. The ranks then tell each other
            their sizes at every call, and the host waits for them. By default plain pieces are taken to be equal, and results
            whose pieces are not (but along the features) are refused as plain ones. DTensors may always be uneven.
        overlap: for linear layers whose input comes cut along another dim than the features: whether it is gathered while it is
            multiplied, and its gradient reduced beside the gradient of the weight. True, or a :class:`hp_tp.OverlapPolicy`
            that says from which size on products are cut. The numbers are the same up to rounding, and so are the bytes that
            are moved. In compiled code it makes no difference.

    Communication per call, with ``b`` bytes of a whole input: of a whole input none, in backward one all-reduce of ``b``;
    of a cut one, one all-gather of ``b``, in backward one reduce-scatter; once for all modules that get the same tensor. Of linear layers
    with a large input the gradients of the weights are computed beside it: [Note: put-off products] in :mod:`hp_tp.styles.put_off`. To
    other output_layouts what redistribution needs. Applying: with src_data_rank one scatter per parameter.

    ValueError for a module of another kind, options that do not fit, heads that do not divide.
    Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3; Korthikanti et al. (arXiv 2205.05198) for cut inputs.
    """

    style = "colwise"
    known = BY_COLUMNS

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        heads: Any = None,
        query_heads: int | None = None,
        replicate_kv: bool = False,
        parts: Any = None,
        cuts: ModuleCuts | None = None,
        uneven: bool = False,
        overlap: Any = False,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
            heads=heads,
            cuts=cuts,
            uneven=uneven,
            overlap=overlap,
        )
        check_flag(replicate_kv, "ColwiseParallel: replicate_kv")
        if replicate_kv != (query_heads is not None) or (replicate_kv and heads is None):
            raise ValueError(
                f"ColwiseParallel: replicate_kv=True needs heads= (of keys and values) and query_heads=, and query_heads is "
                f"for nothing else; got replicate_kv={replicate_kv}, heads={heads}, query_heads={query_heads}"
            )
        if parts is not None and not (use_local_output and output_layouts is None):
            raise ValueError(
                "ColwiseParallel: the result of a layer in parts is handed out as plain pieces, part by part, which no "
                "placement describes: leave out output_layouts and use_local_output, and put the parts where they shall be"
            )
        self.wishes = Wishes(parts, heads, query_heads, replicate_kv)

    def forward_of(self, module: Module, mesh: Any, cuts: ModuleCuts, what: str) -> ByColumns:
        """Whole input, pieces of the features out."""
        usual = Shard(cuts.feature_dim)
        parts = parts_of(
            self.wishes,
            cuts,
            type(self).__name__,
            type(module).__name__,
            mesh.shape[0],
            mesh.get_coordinate()[0],
        )
        is_linear = self.runs_linear(module, cuts, what)
        if self.input_layouts is not None:  # else DTensors come, and say how they lie
            self.check_overlap(self.input_layouts, "input_layouts", what)
        is_usual = len(parts) == 1 and parts[0].chosen is None
        if cuts.on_dtensors and not is_usual:
            raise ValueError(f"{what}: parts and replicated heads are for modules that run on pieces")
        return ByColumns(
            self.door(mesh, usual if cuts.input_is_cut else Replicate(), what),
            usual if self.output_layouts is None else self.output_layouts,
            self.use_local_output,
            cuts,
            parts,
            _features(cuts, parts, mesh.shape[0]),
            is_linear,
            is_usual,
            self.overlap,
        )

    def place(self, module: Module, forward: ByColumns) -> None:
        """Cut every parameter, part by part."""
        place_parts(module, forward.door.mesh, forward.cuts, forward.parts, self.src_data_rank)


def _features(cuts: ModuleCuts, parts: tuple[Part, ...], num_ranks: int) -> int:
    """How many features all ranks together hand out."""
    assert cuts.features is not None
    if parts[0].chosen is None:
        return cuts.features
    return num_ranks * len(parts[0].chosen) * parts[0].unit


@dataclass(frozen=True)
class ByColumns:
    """The forward of a module that was cut by columns."""

    door: Door
    wanted: Placement
    use_local: bool
    cuts: ModuleCuts
    parts: tuple[Part, ...]
    features: int
    is_linear: bool
    """Whether the framework's own linear is all that forward does."""
    is_usual: bool
    """Whether there is one part, and that is cut."""
    overlap: OverlapPolicy | None

    def __call__(
        self, module: Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        door, cuts = self.door, self.cuts
        x = first_argument(args, kwargs, door.what)
        if cuts.on_dtensors:
            y = own(as_dtensor(x, door), *args[1:], **kwargs)
            dim = len(y.shape) + cuts.feature_dim
            return leave(y, self.wanted, door, use_local=self.use_local, known_dim=dim)
        if self.is_linear and self.overlap is not None:
            y = linear_of_whole(x, *self._weights(module), self._shown_weight(module), door, self.overlap)
        elif self.is_linear:
            y = put_off.linear(enter_whole(x, door), *self._weights(module), self._shown_weight(module))
        else:
            if cuts.input_is_cut:
                x = enter_piece(x, door, cuts.feature_dim)
            else:
                x = put_off.is_elsewhere(enter_whole(x, door))
            y = run_with(module, shown(module, cuts, self.parts, door), own, (x, *args[1:]), kwargs)
        dim = y.ndim + cuts.feature_dim
        if not self.is_usual:
            y = given(y, dim, self.parts, door.mesh)
        if len(self.parts) > 1:
            return y
        shape = (*y.shape[:dim], self.features, *y.shape[dim + 1 :])
        return leave_piece(y, shape, dim, self.wanted, door, use_local=self.use_local)

    def _weights(self, module: Module) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a linear layer, this rank's."""
        if self.is_usual:
            return local_of(module.weight), local_of(module.bias)
        found = shown(module, self.cuts, self.parts, self.door)
        return found["weight"], found.get("bias")

    def _shown_weight(self, module: Module) -> Any:
        """What the module shows in the weight's place, or in that of its first part."""
        return getattr(module, self.parts[0].attribute("weight"))

    def collectives(self, module: Module) -> Collectives:
        """What a call sends, for :func:`hp_tp.describe`."""
        num_ranks, cuts, layout = self.door.mesh.shape[0], self.cuts, self.door.layout
        if num_ranks == 1:
            return Collectives()
        kind, weight = get_platform().layer_kind(module), None
        if self.is_linear or kind == "embedding":
            weight = self._shown_weight(module)
        row = None if weight is None else self.features * itemsize_of(weight)
        handed_out = of_move(Shard(cuts.feature_dim), self.wanted, "the result", row, num_ranks)
        if cuts.on_dtensors:
            if kind == "embedding" and layout.is_replicate():
                return handed_out
            return of_operations("the forward").and_then(handed_out)
        row = None if weight is None else weight.shape[1] * itemsize_of(weight)
        if cuts.input_is_cut:
            usual = Shard(cuts.feature_dim)
            taken = of_sizes(layout, self.door.uneven and layout != usual)
            taken = taken.and_then(of_move(layout, usual, "the input", row, num_ranks))
        else:
            taken = of_sizes(layout, self.door.uneven).and_then(of_whole_input(layout, row))
        whole = [
            (n, getattr(module, n))
            for part in self.parts
            for n in map(part.attribute, cuts.parameters)
            if part.chosen is not None
        ]
        whole = whole + [(n, getattr(module, n)) for n, dim in cuts.parameters.items() if dim is None]
        return taken.and_then(handed_out).and_then(Collectives((), of_parameters(whole)))
