"""What is copied at once: one memory, or a bucket of small ones.

[Note: fused copies] Many small copies cost more time to ask for than to make. With ``group_swap`` memories below 32 MiB are packed one
after the other into buckets of at most 32 MiB, at least two in each, by one launch on the device; a bucket is one copy in each
direction, and what comes back are views of it. A bucket is bytes, so dtypes do not matter, and all that a group saves shares them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor
from hp_recompute.swapping.copies import Copies
from hp_recompute.swapping.pinned import HostBuffer, HostPool
from hp_recompute.swapping.storage import ALIGNMENT, State, SwappedStorage

BUCKET_NBYTES = 32 * 2**20


class Parcel:
    """Memories of one group and device that travel together."""

    def __init__(self, platform: Platform, copies: Copies, storages: Sequence[SwappedStorage]) -> None:
        """They get ready to leave."""
        self.platform, self.copies = platform, copies
        self.source: Tensor | None = None
        """On the device, until it is copied."""
        sources = [storage.pack() for storage in storages]
        self._starts: list[tuple[weakref.ref[SwappedStorage], int]] = []
        self.nbytes = 0
        for storage in storages:
            self._starts.append((weakref.ref(storage), self.nbytes))
            storage.parcel = self
            self.nbytes = self.nbytes + -(-storage.nbytes // ALIGNMENT) * ALIGNMENT
        if len(storages) == 1:
            self.nbytes, self.source = storages[0].nbytes, sources[0]
        else:
            self.source = copies.empty_on_device(self.nbytes)
            targets = [
                platform.narrow(self.source, 0, start, storage.nbytes)
                for storage, (_, start) in zip(storages, self._starts, strict=True)
            ]
            platform.foreach_copy_(targets, sources)
        self._buffer: HostBuffer | None = None
        self._on_host: Tensor | None = None

    def __del__(self) -> None:
        """Whoever saved it is gone, and has not waited."""
        self.forsake()

    def pair_out(self, pool: HostPool) -> tuple[Tensor, Tensor]:
        """``(target, source)`` of the copy to the host."""
        self._buffer = pool.take(self.nbytes)
        memory = self._buffer.memory
        self._on_host = (
            memory
            if tuple(memory.shape) == (self.nbytes,)
            else self.platform.narrow(memory, 0, 0, self.nbytes)
        )
        return self._on_host, self.source

    def left(self) -> None:
        """The copy to the host has been waited for."""
        self.source = None
        for storage, _ in self._living():
            storage.leave()

    def forsake(self) -> None:
        """Nobody waits for the copy to the host."""
        if self.source is not None:
            self.copies.let_go([self.source])
            self.source = None

    def pair_back(self) -> tuple[Tensor, Tensor]:
        """``(target, source)`` of the copy to the device, into new memory."""
        return self.copies.empty_on_device(self.nbytes), self._on_host

    def came(self, target: Tensor) -> None:
        """The copy to the device is under way."""
        is_alone = len(self._starts) == 1
        for storage, start in self._living():
            if storage.state is State.HOST:
                memory = target if is_alone else self.platform.narrow(target, 0, start, storage.nbytes)
                storage.come_back(memory)

    def _living(self) -> Iterator[tuple[SwappedStorage, int]]:
        for ref, start in self._starts:
            storage = ref()
            if storage is not None:
                yield storage, start


def parcels(
    platform: Platform, copies: Copies, storages: Sequence[SwappedStorage], *, fused: bool
) -> list[Parcel]:
    """All of them, in order; with ``fused`` see [Note: fused copies]."""
    buckets: list[list[SwappedStorage]] = []
    room = 0
    for storage in storages:
        size = -(-storage.full_nbytes // ALIGNMENT) * ALIGNMENT
        if fused and size <= room:
            buckets[-1].append(storage)
            room = room - size
        else:
            buckets.append([storage])
            room = BUCKET_NBYTES - size if fused else 0
    return [Parcel(platform, copies, bucket) for bucket in buckets]


def portions(made: Sequence[Parcel], number: int) -> list[list[Parcel]]:
    """At most ``number`` of about the same size, in order."""
    least = sum(parcel.nbytes for parcel in made) / number
    found: list[list[Parcel]] = []
    size = least
    for parcel in made:
        if size >= least:
            found.append([])
            size = 0
        found[-1].append(parcel)
        size = size + parcel.nbytes
    return found
