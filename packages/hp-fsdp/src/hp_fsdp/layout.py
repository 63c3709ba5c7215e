"""Where parameters lie in flat rows: pure arithmetic, no framework.

Every rank owns one *row* per buffer: the chunks of its parameters one after the other. All rows of a buffer are equally
long, so that one collective moves them: a chunk takes the place of the longest one, ``ceil(n / ranks)`` rows of dim 0, also
on ranks whose own is short or empty. The chunks of one parameter, taken from all rows in the order of ranks, are then
the parameter itself followed by all of the padding: cutting the end off gives it back without moving anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hp_dtensor.chunk import chunk_length, chunk_offset, chunk_size


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in every rank's row."""

    shape: tuple[int, ...]
    """Of the whole parameter; at least one dim."""
    num_ranks: int
    offset: int
    """First element within the row."""

    @property
    def row_numel(self) -> int:
        """Elements of one index of dim 0."""
        return math.prod(self.shape[1:])

    @property
    def chunk_rows(self) -> int:
        """Length of dim 0 of the longest chunk."""
        return chunk_length(self.shape[0], self.num_ranks)

    @property
    def numel(self) -> int:
        """Elements that the slot takes in a row, padding included."""
        return self.chunk_rows * self.row_numel

    @property
    def padding_rows(self) -> int:
        """By how much dim 0 must grow before it divides into equal chunks."""
        return self.chunk_rows * self.num_ranks - self.shape[0]

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The parameter with its padding."""
        return (self.chunk_rows * self.num_ranks, *self.shape[1:])

    def local_start(self, rank: int) -> int:
        """First index of dim 0 that ``rank`` owns."""
        return chunk_offset(self.shape[0], self.num_ranks, rank)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the shard of ``rank``; dim 0 may be 0."""
        return (chunk_size(self.shape[0], self.num_ranks, rank), *self.shape[1:])

    def local_numel(self, rank: int) -> int:
        """Elements of the shard of ``rank``, without padding."""
        return math.prod(self.local_shape(rank))


@dataclass(frozen=True)
class RowPlan:
    """The slots of one buffer."""

    slots: tuple[Slot, ...]
    num_ranks: int

    @property
    def numel(self) -> int:
        """Elements of one row."""
        return sum(slot.numel for slot in self.slots)

    def padding_of(self, rank: int) -> int:
        """Elements of the row of ``rank`` that belong to no parameter."""
        return self.numel - sum(slot.local_numel(rank) for slot in self.slots)


def plan_rows(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> RowPlan:
    """Lay parameters of these shapes (each with at least one dim) one after the other.

    ValueError for a 0-d shape: scalars are not sharded.
    """
    slots: list[Slot] = []
    offset = 0
    for shape in shapes:
        if not shape:
            raise ValueError(
                "a 0-d parameter has no dim to shard: it is replicated, and takes no place in a row"
            )
        slot = Slot(tuple(shape), num_ranks, offset)
        slots.append(slot)
        offset = offset + slot.numel
    return RowPlan(tuple(slots), num_ranks)
