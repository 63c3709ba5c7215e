"""Gradients that travel in the dtype they were computed in, and are added up in the wider one of the reduction.

[Note: narrow on the wire] Gradients in bfloat16 that are reduced in float32 need not be float32 on the way: float32 holds every
bfloat16 number, so what has been sent narrow and is then widened is the same number. Only sums need the width, and every
rank makes those of its own shards alone. So each rank sends every other one its block as it is (an all-to-all: half of the
bytes of the reduce-scatter, and no pass over all gradients that widens them), and adds up what it has got.

It takes a backend that sends from rank to rank (the capability ``exchange``), and gradients of one backward: what several
backwards without synchronisation have added up is wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_fsdp.places import Places
from hp_platform.collectives.unchecked import all_to_all_into, all_to_all_into_each
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor


class NarrowExchange:
    """Of blocks with a part for every rank: 1-D, the parts of one size one after the other."""

    def __init__(
        self, platform: Platform, places: Places, blocks: Sequence[Tensor], *, is_fused: bool
    ) -> None:
        """Makes the buffers for what will be received: as large as the blocks."""
        self.platform = platform
        self.places = places
        self.blocks = blocks
        self.is_fused = is_fused and len(blocks) > 1
        first, num_ranks = blocks[0], places.num_shards
        self._itemsize = platform.itemsize(first.dtype)
        device = places.device
        self._sizes = [block.shape[0] // num_ranks for block in blocks]
        if self.is_fused:
            self._received = [platform.empty((num_ranks * sum(self._sizes),), first.dtype, device)]
        else:
            self._received = [platform.empty((block.shape[0],), first.dtype, device) for block in blocks]

    def start(self, *, async_op: bool) -> list[Any]:
        """Communication: one all-to-all of all blocks over the shard group; without fusion one of each that is not empty."""
        group, size = self.places.shard_group, self._itemsize
        if not self.is_fused:
            works = [
                all_to_all_into(out, block, group, block.shape[0] * size, async_op)
                for out, block in zip(self._received, self.blocks, strict=True)
                if block.shape[0]
            ]
            return [work for work in works if work is not None]
        platform, num_ranks = self.platform, self.places.num_shards
        rows = platform.split(self._received[0], [sum(self._sizes)] * num_ranks)
        pieces = zip(*(platform.split(row, self._sizes) for row in rows), strict=True)
        outs = [list(of_block) for of_block, numel in zip(pieces, self._sizes, strict=True) if numel]
        xs = [
            platform.split(block, [numel] * num_ranks)
            for block, numel in zip(self.blocks, self._sizes, strict=True)
            if numel
        ]
        work = all_to_all_into_each(outs, xs, group, sum(self._sizes) * num_ranks * size, async_op)
        return [] if work is None else [work]

    def add_up(self, row: Tensor | None, targets: Sequence[Tensor], op: str) -> None:
        """What has come, into ``targets``, one for each block, in their dtype; ``row``: a tensor that begins with all of them."""
        platform, num_ranks = self.platform, self.places.num_shards
        if self.is_fused:
            assert row is not None
            total = platform.narrow(row, 0, 0, sum(self._sizes))
            platform.reduce_rows_(total, platform.reshape(self._received[0], (num_ranks, -1)), op)
            return
        for target, received, numel in zip(targets, self._received, self._sizes, strict=True):
            if numel:
                platform.reduce_rows_(target, platform.reshape(received, (num_ranks, -1)), op)
