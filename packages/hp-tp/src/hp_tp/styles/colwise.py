"""``ColwiseParallel``: every rank computes some of the features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hp_dtensor import Placement, Replicate, Shard
from hp_platform import get_platform
from hp_tp.styles.cuts import BY_COLUMNS, ModuleCuts
from hp_tp.styles.cutting import CuttingStyle
from hp_tp.styles.entrance import Door, as_dtensor, enter_piece, enter_whole, first_argument
from hp_tp.styles.exits import leave, leave_piece
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
        cuts: how the module is cut, if it is of another kind and does not say so itself.
        uneven: whether plain pieces of an input may be of several sizes, and plain results too. The ranks then tell each other
            their sizes at every call, and the host waits for them. By default plain pieces are taken to be equal, and results
            whose pieces are not (but along the features) are refused as plain ones. DTensors may always be uneven.

    Communication per call, with ``b`` bytes of a whole input: of a whole input none, in backward one all-reduce of ``b``;
    of a cut one, one all-gather of ``b``, in backward one reduce-scatter; once for all modules that get the same tensor. To
    other output_layouts what redistribution needs. Applying: with src_data_rank one scatter per parameter.

    ValueError for a module of another kind, options that do not fit, heads that do not divide.
    Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3; Korthikanti et al. (arXiv 2205.05198) for cut inputs.
    """

    style = "colwise"
    known = BY_COLUMNS

    def forward_of(self, module: Module, mesh: Any, cuts: ModuleCuts, what: str) -> Callable[..., Any]:
        """Whole input, pieces of the features out."""
        platform = get_platform()
        usual = Shard(cuts.feature_dim)
        return ByColumns(
            self.door(mesh, usual if cuts.input_is_cut else Replicate(), what),
            usual if self.output_layouts is None else self.output_layouts,
            self.use_local_output,
            cuts,
            platform.layer_kind(module) == "linear" and platform.has_stock_forward(module),
        )


@dataclass(frozen=True)
class ByColumns:
    """The forward of a module that was cut by columns."""

    door: Door
    wanted: Placement
    use_local: bool
    cuts: ModuleCuts
    is_linear: bool
    """Whether the framework's own linear is all that forward does."""

    def __call__(
        self, module: Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        door, cuts = self.door, self.cuts
        x = first_argument(args, kwargs, door.what)
        if cuts.on_dtensors:
            y = own(as_dtensor(x, door), *args[1:], **kwargs)
            dim = len(y.shape) + cuts.feature_dim
            return leave(y, self.wanted, door, use_local=self.use_local, known_dim=dim)
        x = enter_piece(x, door, cuts.feature_dim) if cuts.input_is_cut else enter_whole(x, door)
        platform = get_platform()
        if self.is_linear:
            weight, bias = (local_of(getattr(module, name)) for name in ("weight", "bias"))
            y = platform.linear(x, weight, bias)
        else:
            pieces = {name: local_of(platform.get_parameter(module, name)) for name in cuts.parameters}
            y = run_with(module, pieces, own, (x, *args[1:]), kwargs)
        dim = y.ndim + cuts.feature_dim
        shape = (*y.shape[:dim], cuts.features, *y.shape[dim + 1 :])
        return leave_piece(y, shape, dim, self.wanted, door, use_local=self.use_local)
