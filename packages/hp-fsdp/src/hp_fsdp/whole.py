"""The whole parameters of a unit that have one dtype: where they lie, and how they are filled from all ranks' rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

from hp_fsdp.buffer import FlatBuffer
from hp_fsdp.layout import Slot
from hp_fsdp.peer_gather import PeerGather
from hp_fsdp.peers import Peers
from hp_fsdp.places import Places
from hp_platform import collectives
from hp_platform.collectives.unchecked import all_gather_into_each
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import DType, Tensor

Follow = Callable[[], None]
MOST_GATHERS = 16
"""Of a unit that are kept as one launch: one for each place in which its whole parameters lie, and for the half that they come through."""
ALIGNMENT = 64
"""Elements: whole parameters begin at multiples of it (128 bytes of a 16-bit dtype)."""


class WholeParameters:
    """[Note: where whole parameters lie] All in one storage where the platform can resize one below several tensors: one
    allocation per gather. Each takes the room of its padded chunks, so that what the ranks send lands in its place.

    [Note: four ways to gather] Where all ranks are devices of one machine that reach each other's memory, they copy from each
    other, beside all kernels ([Note: copies instead of collectives] in :mod:`hp_platform.halves`). Else, where the backend takes
    several tensors in one launch, every chunk is received where the parameter has it, and nothing is copied (but for parameters
    that are cut along another dim than the first). Where it cannot, rows travel as they lie, and are taken apart by a copy. Without fusion every
    parameter travels alone.

    [Note: writes that do not count] What is filled holds the values that autograd has seen before ([Note: one whole tensor for ever]), and
    threads of a backend may write at any time. So it is written to as memory whose writes do not count.
    """

    def __init__(
        self,
        platform: Platform,
        buffers: Sequence[FlatBuffer],
        dtype: DType,
        places: Places,
        *,
        is_fused: bool,
    ) -> None:
        self.platform = platform
        self.buffers = tuple(buffers)
        self.dtype = dtype
        self.places = places
        self.params = [param for buffer in buffers for param in buffer.params]
        self.slots = [slot for buffer in buffers for slot in buffer.plan.slots]
        self._in_place = receives_in_place(platform, places, is_fused=is_fused)
        self._is_fused = is_fused
        self._shares = platform.supports("write_into_view", places.device)
        self.storages: list[Tensor] = []
        """Tensors that together are all memory of the whole parameters."""
        self.nbytes: list[int] = []
        """Of each of these, while they are there."""
        self._targets: list[Tensor] = []
        """What is filled, for every parameter: ``(ranks, slot.numel)``, which is the parameter and its padding; the parameter
        itself if it is not cut along its first dim. See [Note: writes that do not count]."""
        self._make()
        self.fulls = [param.full for param in self.params]
        self._follows = [
            (slot, target)
            for slot, target in zip(self.slots, self._targets, strict=True)
            if not slot.is_leading
        ]
        """What is not where it belongs when it has been received."""
        self._flat = [platform.reshape(target, (-1,)) for target in self._targets] if self._in_place else []
        """The targets in one dim: 1-D pieces are the quickest to make, and the host's time counts."""
        numel = sum(slot.num_ranks * slot.numel for slot in self.slots)
        self._wire_nbytes = numel * platform.itemsize(dtype)
        self._by_peers: PeerGather | None = None
        self._peers: Peers | None = None
        """With whose memory :attr:`_by_peers` was made."""
        self._rows: list[Tensor] = []
        self._kept_parts: list[Tensor] = []
        """Parts of these."""
        self._values: list[Tensor] = []
        """The same in the shapes of the targets."""
        self._keeps_parts = all(buffer.shares_memory and buffer.host is None for buffer in buffers)

    def _make(self) -> None:
        platform, device = self.platform, self.places.device
        shapes = [(slot.num_ranks, slot.numel) if slot.is_leading else slot.shape for slot in self.slots]
        if platform.supports("storage_views", device) and self._shares:
            # Fillers between them let each begin where kernels like it.
            fillers = [(-math.prod(shape) % ALIGNMENT,) for shape in shapes]
            mixed = [shape for pair in zip(shapes, fillers, strict=True) for shape in pair]
            base, views = platform.storage_views(mixed, self.dtype, device)
            self.storages, self._targets = [base], views[::2]
        else:
            self._targets = [platform.empty(shape, self.dtype, device) for shape in shapes]
            self.storages = list(self._targets)
        size = platform.itemsize(self.dtype)
        self.nbytes = [math.prod(storage.shape) * size for storage in self.storages]
        for param, slot, target in zip(self.params, self.slots, self._targets, strict=True):
            whole = target
            if slot.is_leading:
                whole = platform.narrow(platform.reshape(target, slot.padded_shape), 0, 0, slot.shape[0])
            param.set_whole(whole, is_alias=False)
        self._targets = [platform.uncounted(target) for target in self._targets]
        self.free()

    def allocate(self) -> None:
        """Get memory below the whole parameters, for the caller to fill."""
        for storage, nbytes in zip(self.storages, self.nbytes, strict=True):
            if nbytes:
                self.platform.resize_storage_(storage, nbytes)

    def free(self) -> None:
        """Give the memory back. The tensors and what views them stay as objects."""
        for storage, nbytes in zip(self.storages, self.nbytes, strict=True):
            if nbytes:
                self.platform.resize_storage_(storage, 0)

    # --- gathering
    def launch(self, async_op: bool, peers: Peers | None) -> Follow:
        """Start filling the allocated memory with the shards' present values; what has to follow the collectives.

        ``peers``: who reaches each other's memory, on whose streams work is queued; None: not asked for.

        Communication: one all-gather over the shard group, ``ranks * row`` elements (without fusion one per parameter).
        """
        platform = self.platform
        if self.places.num_shards == 1 and self._shares:
            return self._fill_alone
        if peers is not None and (peers is self._peers or self._can_copy(peers)):
            assert self._by_peers is not None
            self._by_peers.run(self._parts())
            if not self._keeps_parts:
                self._by_peers.forget()
            return _nothing
        rows = platform.foreach_cast([self._on_device(buffer.row()) for buffer in self.buffers], self.dtype)
        if not self._in_place:
            return self._launch_rows(rows, async_op)
        chunks = [
            chunk
            for buffer, row in zip(self.buffers, rows, strict=True)
            for chunk in platform.split(row, buffer.plan.sizes)
        ]
        received = self._flat
        if self._follows:
            received = [
                flat
                if slot.is_leading
                else platform.empty((slot.num_ranks * slot.numel,), self.dtype, self.places.device)
                for slot, flat in zip(self.slots, self._flat, strict=True)
            ]
        works = self._start(received, chunks, async_op)
        if not works and not self._follows:
            return _nothing

        def follow() -> None:
            for work in works:
                work.wait()
            moved = [lines for slot, lines in zip(self.slots, received, strict=True) if not slot.is_leading]
            for (slot, target), lines in zip(self._follows, moved, strict=True):
                matrix = platform.reshape(lines, (slot.num_ranks, slot.numel))
                platform.copy_(target, put_together(platform, matrix, slot))

        return follow

    def _can_copy(self, peers: Peers) -> bool:
        if self._follows or not self._in_place or not self._wire_nbytes:
            return False
        halves = peers.halves("gather", self.dtype)
        if halves is None:
            return False
        # A unit that has come to another root goes through that root's memory, in the order of its streams.
        if self._by_peers is None or self._by_peers.halves is not halves:
            sizes = [slot.numel for slot in self.slots]
            with self.platform.recordable():  # it stays
                self._by_peers = PeerGather(
                    self.platform, halves, self._flat, sizes, self.storages, peers.repeated(MOST_GATHERS)
                )
        self._peers = peers
        return True

    def _start(self, received: list[Tensor], chunks: list[Tensor], async_op: bool) -> list[Any]:
        """Launch; what is to be waited for."""
        group = self.places.shard_group
        if self._is_fused and group.size > 1 and self._wire_nbytes:
            work: Any = all_gather_into_each(received, chunks, group, self._wire_nbytes, async_op)
            return [work] if async_op else []
        works = [
            collectives.all_gather(chunk, group, out=target, async_op=async_op)
            for chunk, target in zip(chunks, received, strict=True)
        ]
        return works if async_op else []

    def _fill_alone(self) -> None:
        """One rank has all of it: cast in one pass."""
        platform, before = self.platform, self._kept_parts
        parts = self._parts()
        if parts is not before or not self._values:
            self._values = [
                platform.reshape(part, tuple(target.shape))
                for part, target in zip(parts, self._targets, strict=True)
            ]
        platform.foreach_copy_(self._targets, self._values)
        if not self._keeps_parts:
            self._values = []

    def _parts(self) -> list[Tensor]:
        """The pieces of this rank as they lie in the rows, with their padding, on the device. The same list while rows are the same."""
        platform = self.platform
        rows = [buffer.row() for buffer in self.buffers]
        if self._keeps_parts and self._kept_parts and all(map(is_, rows, self._rows)):
            return self._kept_parts
        with platform.recordable():  # they may stay
            parts = [
                part
                for buffer, row in zip(self.buffers, rows, strict=True)
                for part in platform.split(self._on_device(row), buffer.plan.sizes)
            ]
        if self._keeps_parts:
            self._rows, self._kept_parts = rows, parts
        return parts

    def _launch_rows(self, rows: Sequence[Tensor], async_op: bool) -> Follow:
        platform, num_shards = self.platform, self.places.num_shards
        row = rows[0] if len(rows) == 1 else platform.cat(rows)
        given = collectives.all_gather(row, self.places.shard_group, async_op=async_op)

        def follow() -> None:
            matrix = platform.reshape(given.wait() if async_op else given, (num_shards, row.shape[0]))
            values, start = [], 0
            for slot in self.slots:
                lines = platform.narrow(matrix, 1, start, slot.numel)
                start = start + slot.numel
                values.append(lines if slot.is_leading else put_together(platform, lines, slot))
            platform.foreach_copy_(self._targets, values)

        return follow

    def _on_device(self, row: Tensor) -> Tensor:
        """An offloaded row travels to the device first."""
        return self.platform.to_device(row, self.places.device, non_blocking=True)


def receives_in_place(platform: Platform, places: Places, *, is_fused: bool) -> bool:
    """Whether chunks are received where parameters have them; see [Note: four ways to gather]."""
    return not is_fused or platform.can_coalesce(places.device.partition(":")[0])


def _nothing() -> None:
    """Whole parameters are where they belong."""


def put_together(platform: Platform, lines: Tensor, slot: Slot) -> Tensor:
    """A parameter that is not cut along its first dim, of ``(ranks, slot.numel)``: a copy in its own shape."""
    chunks = []
    for rank in range(slot.num_ranks):
        flat = platform.narrow(platform.narrow(lines, 0, rank, 1), 1, 0, slot.local_numel(rank))
        chunks.append(platform.reshape(flat, slot.local_shape(rank)))
    return platform.cat(chunks, slot.dim)
