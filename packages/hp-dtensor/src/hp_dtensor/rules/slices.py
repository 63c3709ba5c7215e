"""Parts of a dim: which of its elements a rank holds, and narrow and select.

A part that gives every rank just its chunk of the result stays as it is cut. Of another one every rank gives what it has,
among zeros, as a summand: reducing the part moves less than joining the whole, if it is at most half of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.placements import PARTIAL, REPLICATE, Placement, Shard
from hp_dtensor.rules.along import one_dim
from hp_dtensor.rules.registry import Outcome, Placements, rule
from hp_dtensor.spec import Spec, local_block
from hp_platform import get_platform

Tensor = Any


@dataclass(frozen=True)
class Part:
    """``count`` elements of a dim from ``start`` on, each ``step`` after the one before."""

    start: int
    step: int
    count: int

    def within(self, offset: int, size: int) -> tuple[int, int]:
        """The first of its elements that lies in a block of the dim, and how many do."""
        first = max(0, -(-(offset - self.start) // self.step))
        end = max(0, -(-(offset + size - self.start) // self.step))
        first, end = min(first, self.count), min(end, self.count)
        return first, max(0, end - first)


class Parts:
    """What becomes of the placements of a tensor of which a part of every dim is taken.

    ``dropped`` are dims that the result lacks; their parts are single elements.
    """

    def __init__(self, x: Spec, parts: Sequence[Part], dropped: Collection[int] = ()) -> None:
        self.spec, self.parts, self.dropped = x, tuple(parts), frozenset(dropped)
        self.shape = tuple(part.count for dim, part in enumerate(parts) if dim not in dropped)
        kept: list[Placement] = []
        output: list[Placement] = []
        ways = {dim: self._way(dim) for dim in range(len(parts))}
        for placement in x.placements:
            way = ways[placement.dim] if isinstance(placement, Shard) else placement
            kept.append(REPLICATE if way is REPLICATE else placement)
            output.append(Shard(self._place(way.dim)) if isinstance(way, Shard) else way)
        self.kept: Placements = tuple(kept)
        self.output: Placements = tuple(output)
        sizes, offsets = local_block(x.shape, kept, x.mesh.shape, x.mesh.get_coordinate())
        self.local = [part.within(o, n) for part, o, n in zip(parts, offsets, sizes, strict=True)]
        """For each dim, where this rank's share of the part begins in it, and how much it is."""
        self.index = tuple(
            slice(part.start + first * part.step - o, part.start + (first + n) * part.step - o, part.step)
            if n
            else slice(0, 0)
            for part, (first, n), o in zip(parts, self.local, offsets, strict=True)
        )
        self.summed = [
            dim
            for dim in range(len(parts))
            if any(p.is_shard(dim) and out is PARTIAL for p, out in zip(kept, output, strict=True))
        ]

    def _place(self, dim: int) -> int:
        return dim - sum(d < dim for d in self.dropped)

    def _way(self, dim: int) -> Placement:
        part, n = self.parts[dim], self.spec.shape[dim]
        if dim not in self.dropped and _fits(self.spec, dim, part):
            return Shard(dim)
        return PARTIAL if 2 * part.count <= n else REPLICATE

    def taken(self, local: Tensor) -> Tensor:
        """This rank's share of the part of its piece (which lies as ``kept`` says), zeros for what others have."""
        platform = get_platform()
        y = local
        for dim, index in enumerate(self.index):
            if index != slice(0, local.shape[dim], 1):
                y = (
                    platform.narrow(y, dim, index.start, index.stop - index.start)
                    if index.step in (None, 1)
                    else y[(slice(None),) * dim + (index,)]
                )
        for dim in self.summed:
            first, n = self.local[dim]
            y = _among_zeros(y, dim, first, self.parts[dim].count - first - n)
        return (
            y[tuple(0 if d in self.dropped else slice(None) for d in range(len(self.parts)))]
            if self.dropped
            else y
        )


def _among_zeros(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    platform = get_platform()

    def zeros(n: int) -> list[Tensor]:
        shape = (*x.shape[:dim], n, *x.shape[dim + 1 :])
        return [platform.zeros(shape, x.dtype, platform.device_of(x))] if n else []

    pieces = [*zeros(before), x, *zeros(after)]
    return platform.cat(pieces, dim) if len(pieces) > 1 else x


def _fits(spec: Spec, dim: int, part: Part) -> bool:
    """Whether every rank's share of the part is its chunk of a dim of that length."""
    if part == Part(0, 1, spec.shape[dim]):
        return True
    cutting = [p if p.is_shard(dim) else REPLICATE for p in spec.placements]
    before = spec.shape[: dim + 1]
    after = (*spec.shape[:dim], part.count)
    for coordinate in itertools.product(*map(range, spec.mesh.shape)):
        sizes, offsets = local_block(before, cutting, spec.mesh.shape, coordinate)
        first, count = part.within(offsets[dim], sizes[dim])
        sizes, offsets = local_block(after, cutting, spec.mesh.shape, coordinate)
        if count != sizes[dim] or (count and first != offsets[dim]):
            return False
    return True


def whole_parts(x: Spec) -> list[Part]:
    """All of every dim."""
    return [Part(0, 1, n) for n in x.shape]


@rule("narrow", params=("input", "dim", "start", "length"), views=True)
def narrow(x: Any, dim: int, start: Any, length: int) -> Outcome:
    """``length`` elements of a dim from ``start`` on."""
    at = one_dim(dim, len(x.shape))
    if isinstance(start, Spec):
        raise ValueError("start must be an int, not a tensor: use item()")
    n = x.shape[at] if x.shape else 0
    first = start + n if start < 0 else start
    if not (x.shape and first >= 0 and length >= 0 and first + length <= n):
        raise ValueError(f"{length} elements from {start} on do not lie within dim {dim} of size {n}")
    parts = whole_parts(x)
    parts[at] = Part(first, 1, length)
    found = Parts(x, parts)
    return Outcome((found.kept,), found.output, found.shape, run=lambda local, *_: found.taken(local))


@rule("select", params=("input", "dim", "index"), views=True)
def select(x: Any, dim: int, index: Any) -> Outcome:
    """One element of a dim, without the dim."""
    at = one_dim(dim, len(x.shape))
    if isinstance(index, Spec):
        raise ValueError("index must be an int, not a tensor: use index_select, or item()")
    n = x.shape[at] if x.shape else 0
    if not -n <= index < n:
        raise IndexError(f"index {index} is out of range for dim {dim} of size {n}")
    parts = whole_parts(x)
    parts[at] = Part(index % n, 1, 1)
    found = Parts(x, parts, {at})
    return Outcome((found.kept,), found.output, found.shape, run=lambda local, *_: found.taken(local))
