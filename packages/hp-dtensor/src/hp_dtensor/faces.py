"""The second face of a gathered tensor: the same values for operations that differ between ranks, reached another way.

[Note: two faces] Shard to Replicate is an all-gather. Where the result is used alike on all ranks, the gradient is the same
everywhere, and backward slices it. Where ranks use it differently, each has a summand of the gradient: a mark would sum
them over all ranks, only to slice the sum. So for such uses there is a second face over the same buffer, joined to the
tensor *before* the gather, whose backward reduce-scatters. Dispatch takes the face that a use needs; what both give adds up
in front of the gather. A sequence-parallel block so costs one gather and one reduce-scatter each way.

The second face goes around the gathered tensor: a hook on that, or its kept gradient, would miss what flows there. So asking
for one before the face is used turns the face off (then a mark sums, as for any Replicate tensor), and after is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor import conversions
from hp_dtensor.planning import Move, Step
from hp_dtensor.redistribution import joined_last, source_cut
from hp_dtensor.spec import Spec
from hp_platform import get_platform

Tensor = Any


def trailing_gathers(moves: Sequence[Move]) -> Sequence[Move]:
    """The all-gathers that end a plan."""
    joined, start = joined_last(moves), len(moves)
    while start and moves[start - 1].step is Step.ALL_GATHER and moves[start - 1].mesh_dim in joined:
        start = start - 1
    return moves[start:]


class Gathered:
    """What the second face of one gathered local tensor is made of."""

    __slots__ = ("dims", "is_used", "moves", "source", "spec", "version", "whole", "whole_version")

    def __init__(self, source: Tensor, whole: Tensor, spec: Spec, moves: Sequence[Move]) -> None:
        version = get_platform().version
        self.source, self.version = source, version(source)
        self.whole, self.whole_version = whole, version(whole)
        self.spec, self.moves = spec, moves
        self.dims = frozenset(move.mesh_dim for move in moves)
        self.is_used = False

    def is_valid(self, local: Tensor) -> bool:
        """Whether ``local`` is the gathered tensor, and neither side was written since."""
        version = get_platform().version
        return (
            local is self.whole
            and version(local) == self.whole_version
            and version(self.source) == self.version
        )

    def face(self, varying: frozenset[int], used: Any) -> Tensor:
        """The values for an operation that differs along the mesh dims ``varying``. No communication.

        ``used()`` is called when the backward of the outermost varying gather begins.
        """
        self.is_used = True
        platform = get_platform()
        cuts = [source_cut(self.spec, move) for move in self.moves]
        arrived = [platform.detach(self.whole)]
        for cut in reversed(cuts[1:]):
            start = sum(cut.sizes[: cut.index])
            part = platform.narrow(arrived[0], cut.dim, start, cut.sizes[cut.index])
            arrived.insert(0, platform.clone(part))
        x = self.source
        last = max(i for i, move in enumerate(self.moves) if move.mesh_dim in varying)
        for i, (move, cut, whole) in enumerate(zip(self.moves, cuts, arrived, strict=True)):
            if move.mesh_dim in varying:
                x = conversions.gather_varying(x, cut, (whole,), used if i == last else None)
            else:
                x = conversions.gather(x, cut, (whole,))
        return x
