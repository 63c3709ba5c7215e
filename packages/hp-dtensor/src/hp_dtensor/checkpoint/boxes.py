"""Boxes: which part of a tensor a piece is, as the offset and the size along every dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A part of a tensor; for a tensor without dims both are empty, and it holds the one element."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies in the array of ``outer``, which holds it."""
        starts = [mine - theirs for mine, theirs in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.size, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The elements ``start`` to ``stop`` of the flat (row-major) order as boxes, each a run itself; at most two per dim."""
    if start >= stop:
        return []
    if len(shape) == 1:
        return [Box((start,), (stop - start,))]
    rest = tuple(shape[1:])
    row = math.prod(rest)
    found: list[Box] = []
    while start < stop:
        index, within = divmod(start, row)
        if within == 0 and stop - start >= row:
            count = (stop - start) // row
            found.append(Box((index, *(0 for _ in rest)), (count, *rest)))
            start = start + count * row
        else:
            length = min(stop - start, row - within)
            inner = boxes_of_run(rest, within, within + length)
            found.extend(Box((index, *box.offset), (1, *box.size)) for box in inner)
            start = start + length
    return found


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes have in common; None if that is nothing."""
    starts, sizes = [], []
    for a_start, a_size, b_start, b_size in zip(a.offset, a.size, b.offset, b.size, strict=True):
        start = max(a_start, b_start)
        size = min(a_start + a_size, b_start + b_size) - start
        if size <= 0:
            return None
        starts.append(start)
        sizes.append(size)
    return Box(tuple(starts), tuple(sizes))


def without_contained(boxes: Sequence[Box]) -> list[Box]:
    """The boxes that are not part of another one, each once, in the order given."""
    kept: list[Box] = []
    for box in sorted(set(boxes), key=lambda box: -box.volume):
        if not any(overlap(box, larger) == box for larger in kept):
            kept.append(box)
    order = {box: index for index, box in reversed(list(enumerate(boxes)))}
    return sorted(kept, key=order.__getitem__)
