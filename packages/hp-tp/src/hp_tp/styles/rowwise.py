"""``RowwiseParallel``: every rank computes a summand of the result, from some of the features that go in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hp_dtensor import Placement, Replicate, Shard
from hp_dtensor.chunk import chunk_size
from hp_platform import get_platform
from hp_tp.overlap.at_doors import summed_linear
from hp_tp.overlap.policy import OverlapPolicy
from hp_tp.styles.collectives import (
    Collectives,
    itemsize_of,
    of_move,
    of_operations,
    of_parameters,
    of_sizes,
    of_sum,
)
from hp_tp.styles.cuts import BY_ROWS, ModuleCuts
from hp_tp.styles.cutting import CuttingStyle
from hp_tp.styles.door import Door, refused
from hp_tp.styles.entrance import as_dtensor, enter_piece, first_argument
from hp_tp.styles.exits import leave, leave_reduced, leave_sum
from hp_tp.styles.heads import check_heads
from hp_tp.styles.placing import local_of, place, run_with, summed_over

Tensor = Any
Module = Any


class RowwiseParallel(CuttingStyle):
    """Cut a layer by the features that it takes: every rank computes a summand of the result, and they are added up.

    Of ``y = x @ weight.T + bias`` with ``x (..., in)`` every rank holds ``weight (out, in / ranks)`` as a DTensor Shard(1) and the
    whole ``bias (out,)``, takes ``x (..., in / ranks)``, as a ColwiseParallel layer gives it, and the bias is added once, after
    the reduction. Of an Embedding with ``weight (num, dim)`` the rows are cut, Shard(0), and every rank gives zeros for ids that
    it does not have; of a convolution the channels that go in; of other modules what they say (:class:`hp_tp.ModuleCuts`).

    Args:
        input_layouts: how a plain input lies; default: cut along the features, Shard(-1) for Linear, and Replicate() for ids. A
            DTensor knows it itself.
        output_layouts: how the result shall lie: Replicate() (default), or Shard(d), such as the sequence dim.
        use_local_output: whether the result is handed out as a plain tensor (default) or as a DTensor.
        heads: number of attention heads that the features that go in are made of. They must divide over the ranks.
        cuts, uneven: as for :class:`ColwiseParallel`.
        overlap: for linear layers whose result is cut along another dim than the features: whether it is reduced while it is
            computed, and its gradient gathered while it is multiplied; as for :class:`ColwiseParallel`.

    Communication per call, with ``b`` bytes of a whole result: one all-reduce of ``b``, in backward none; for a cut result one
    reduce-scatter of ``b``, in backward one all-gather, and one all-reduce of the bias' gradient.

    ValueError for a module of another kind, options that do not fit, heads that do not divide, and at the call for
    a piece of another size than the weight's. Source: as :class:`ColwiseParallel`.
    """

    style = "rowwise"
    known = BY_ROWS

    def forward_of(self, module: Module, mesh: Any, cuts: ModuleCuts, what: str) -> ByRows:
        """Pieces of the features in, a sum out."""
        assert cuts.features is not None
        platform = get_platform()
        kind, num_ranks = platform.layer_kind(module), mesh.shape[0]
        if self.heads is not None:
            check_heads("RowwiseParallel", type(module).__name__, self.heads, cuts.features, num_ranks)
        wanted = Replicate() if self.output_layouts is None else self.output_layouts
        is_linear = self.runs_linear(module, cuts, what)
        self.check_overlap(wanted, "output_layouts", what)
        return ByRows(
            self.door(mesh, Replicate() if kind == "embedding" else Shard(cuts.feature_dim), what),
            wanted,
            self.use_local_output,
            cuts,
            is_linear,
            self.overlap,
            chunk_size(cuts.features, num_ranks, mesh.get_coordinate()[0]),
        )

    def place(self, module: Module, forward: ByRows) -> None:
        """Cut the parameters; those that are not cut are whole everywhere."""
        dims = forward.cuts.parameters.items()
        placements = {name: Replicate() if dim is None else Shard(dim) for name, dim in dims}
        place(module, forward.door.mesh, placements, self.src_data_rank)


@dataclass(frozen=True)
class ByRows:
    """The forward of a module that was cut by rows."""

    door: Door
    wanted: Placement
    use_local: bool
    cuts: ModuleCuts
    is_linear: bool
    """Whether the framework's own linear is all that forward does."""
    overlap: OverlapPolicy | None
    size: int
    """How many features this rank takes."""

    def __call__(
        self, module: Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        door, cuts = self.door, self.cuts
        x = first_argument(args, kwargs, door.what)
        if cuts.on_dtensors:
            y = own(as_dtensor(x, door), *args[1:], **kwargs)
            return leave(y, self.wanted, door, use_local=self.use_local, known_dim=len(y.shape) - 1)
        x = enter_piece(x, door, cuts.feature_dim)
        if x.shape[cuts.feature_dim] != self.size:
            raise refused(
                door.what,
                f"the input's piece has {x.shape[cuts.feature_dim]} of {cuts.features} features on this rank, the "
                f"parameters' has {self.size}: a plain input is taken to lie as {door.layout}; say input_layouts, or give a DTensor",
            )
        platform = get_platform()
        after = (
            None if cuts.added_after is None else local_of(platform.get_parameter(module, cuts.added_after))
        )
        if self.is_linear and self.overlap is not None:
            weight = local_of(module.weight)
            piece = summed_linear(x, weight, self.wanted, door, self.overlap)
            if piece is not None:
                shape, dim = (*x.shape[:-1], weight.shape[0]), x.ndim - 1
                return leave_reduced(piece, after, shape, dim, self.wanted, door, use_local=self.use_local)
        if self.is_linear:
            y = platform.linear(x, local_of(module.weight), None)
        else:
            y = run_with(module, self._shown(module), own, (x, *args[1:]), kwargs)
        dim = y.ndim + cuts.feature_dim
        return leave_sum(y, after, tuple(y.shape), dim, self.wanted, door, use_local=self.use_local)

    def _shown(self, module: Module) -> dict[str, Any]:
        """What forward finds in the places of the parameters."""
        platform, found = get_platform(), {}
        for name, dim in self.cuts.parameters.items():
            piece = local_of(platform.get_parameter(module, name))
            found[name] = piece if dim is not None else summed_over(piece, self.door)
        if self.cuts.added_after is not None:
            found[self.cuts.added_after] = None
        return found

    def collectives(self, module: Module) -> Collectives:
        """What a call sends, for :func:`hp_tp.describe`."""
        platform, num_ranks, cuts = get_platform(), self.door.mesh.shape[0], self.cuts
        if num_ranks == 1:
            return Collectives()
        kind, given, row, bias = platform.layer_kind(module), None, None, None
        if kind in ("linear", "embedding"):
            out, inside = module.weight.shape if kind == "linear" else module.weight.shape[::-1]
            given, row = (size * itemsize_of(module.weight) for size in (inside, out))
        if cuts.on_dtensors and not (kind == "embedding" and self.door.layout.is_replicate()):
            return of_operations("the forward and of its result")
        if cuts.added_after is not None:
            bias = platform.get_parameter(module, cuts.added_after)
        reduced = of_sum(self.wanted, row, bias, cuts.feature_dim, num_ranks)
        if cuts.on_dtensors:
            return reduced
        layout, usual = self.door.layout, Shard(cuts.feature_dim)
        taken = of_sizes(layout, self.door.uneven and layout != usual)
        taken = taken.and_then(of_move(layout, usual, "the input", given, num_ranks))
        whole = [n for n, dim in cuts.parameters.items() if dim is None and n != cuts.added_after]
        back = of_parameters([(n, platform.get_parameter(module, n)) for n in whole])
        return taken.and_then(Collectives((), back)).and_then(reduced)
