"""Where parameters lie in flat rows: pure arithmetic, no framework.

Every rank owns one *row* per buffer: the chunks of its parameters one after the other. All rows of a buffer are equally
long, so that one collective moves them: a chunk takes the place of the longest one, ``ceil(n / ranks)`` indices of the
sharded dim, also on ranks whose own is short or empty. If that dim is the first, the chunks of one parameter, taken from all
rows in the order of ranks, are the parameter itself followed by all of the padding: cutting the end off gives it back
without moving anything. Chunks of another dim have to be put together by a copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hp_dtensor.chunk import chunk_length, chunk_offset, chunk_size


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in every rank's row."""

    shape: tuple[int, ...]
    """Of the whole parameter; at least one dim."""
    num_ranks: int
    offset: int
    """First element within the row."""
    dim: int = 0
    """Which dim is cut."""

    @cached_property
    def is_leading(self) -> bool:
        """Whether the chunks of all ranks, one after the other, are the parameter."""
        return self.dim == 0

    @cached_property
    def whole_numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @cached_property
    def numel(self) -> int:
        """Elements that the slot takes in a row, padding included."""
        longest = chunk_length(self.shape[self.dim], self.num_ranks)
        return longest * math.prod((*self.shape[: self.dim], *self.shape[self.dim + 1 :]))

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """The parameter with its padding, if the sharded dim is the first."""
        return (chunk_length(self.shape[0], self.num_ranks) * self.num_ranks, *self.shape[1:])

    @cached_property
    def padding_numel(self) -> int:
        """Elements of the slots of all ranks together that belong to nobody."""
        return self.numel * self.num_ranks - self.whole_numel

    def local_start(self, rank: int) -> int:
        """First index of the sharded dim that ``rank`` owns."""
        return chunk_offset(self.shape[self.dim], self.num_ranks, rank)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the shard of ``rank``; its sharded dim may be 0."""
        length = chunk_size(self.shape[self.dim], self.num_ranks, rank)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    def local_numel(self, rank: int) -> int:
        """Elements of the shard of ``rank``, without padding."""
        return math.prod(self.local_shape(rank))


@dataclass(frozen=True)
class RowPlan:
    """The slots of one buffer."""

    slots: tuple[Slot, ...]
    num_ranks: int

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of the slots."""
        return [slot.numel for slot in self.slots]

    @cached_property
    def numel(self) -> int:
        """Elements of one row."""
        return sum(self.sizes)

    def padding_of(self, rank: int) -> int:
        """Elements of the row of ``rank`` that belong to no parameter."""
        return self.numel - sum(slot.local_numel(rank) for slot in self.slots)


def plan_rows(
    shapes: Sequence[tuple[int, ...]], num_ranks: int, dims: Sequence[int] | None = None
) -> RowPlan:
    """Lay parameters of these shapes (each with at least one dim) one after the other; ``dims`` are cut, default all 0.

    ValueError for a 0-d shape: scalars are not sharded.
    """
    slots: list[Slot] = []
    offset = 0
    for shape, dim in zip(shapes, [0] * len(shapes) if dims is None else dims, strict=True):
        if not shape:
            raise ValueError(
                "a 0-d parameter has no dim to shard: it is replicated, and takes no place in a row"
            )
        slot = Slot(tuple(shape), num_ranks, offset, dim)
        slots.append(slot)
        offset = offset + slot.numel
    return RowPlan(tuple(slots), num_ranks)
