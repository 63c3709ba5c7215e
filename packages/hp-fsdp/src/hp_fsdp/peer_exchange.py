"""Gradients that are copied into the other ranks' memory, and added up there; see [Note: copies instead of collectives].

They travel in the dtype they come in, and are added up in that of the result: see [Note: narrow on the wire].
"""

from __future__ import annotations

from collections.abc import Sequence

from hp_fsdp.batches import Batch, cut_into_batches
from hp_fsdp.peers import ALIGNMENT, Halves
from hp_platform.collectives.unchecked import by_copies
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor


class PeerExchange:
    """Of blocks with a part for every rank: 1-D, the parts of one size one after the other."""

    def __init__(self, platform: Platform, halves: Halves, blocks: Sequence[Tensor], kind: str) -> None:
        """``kind``: the collective that it counts as."""
        self.platform = platform
        self.halves = halves
        self.blocks = blocks
        self.kind = kind
        num_ranks = halves.group.size
        self._sizes = [block.shape[0] // num_ranks for block in blocks]
        self._capacity = halves.numel // num_ranks // ALIGNMENT * ALIGNMENT
        """Of a rank's row in a half."""

    def run(self, row: Tensor, op: str) -> None:
        """The first elements of ``row`` become the ``"sum"`` or ``"mean"`` of this rank's parts, one after the other, in its dtype.

        On the current stream. Communication: counts as one collective of all blocks.
        """
        numel = sum(self._sizes) * self.halves.group.size
        nbytes = numel * self.platform.itemsize(self.halves.dtype)
        by_copies(self.kind, self.halves.group, nbytes, lambda: self._run(row, op), len(self.blocks))

    def _run(self, row: Tensor, op: str) -> None:
        platform, halves, group = self.platform, self.halves, self.halves.group
        narrow = platform.narrow
        others = [rank % group.size for rank in range(group.rank + 1, group.rank + group.size)]
        for batch in cut_into_batches(self._sizes, self._capacity):
            half = halves.turn()
            places = [place for rank in others for place in self._places(batch, halves.of(half, rank))]
            values = [value for rank in others for value in self._values(batch, rank)]
            halves.copy_each(places, values)
            own = halves.of(half, group.rank)
            platform.foreach_copy_(self._places(batch, own), self._values(batch, group.rank))
            halves.barrier()
            rows = platform.reshape(
                narrow(own, 0, 0, group.size * self._capacity), (group.size, self._capacity)
            )
            total = narrow(row, 0, batch.start, batch.numel)
            platform.reduce_rows_(total, narrow(rows, 1, 0, batch.numel), op)

    def _places(self, batch: Batch, flat: Tensor) -> list[Tensor]:
        """In this rank's row of somebody's half."""
        start = self.halves.group.rank * self._capacity
        return [self.platform.narrow(flat, 0, start + part.offset, part.numel) for part in batch.parts]

    def _values(self, batch: Batch, rank: int) -> list[Tensor]:
        return [
            self.platform.narrow(
                self.blocks[part.piece], 0, rank * self._sizes[part.piece] + part.start, part.numel
            )
            for part in batch.parts
        ]
