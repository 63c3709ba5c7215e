"""A step of element-wise updates whose state lies on the host: through the device in buckets.

[Note: buckets] State is cut into buckets of equal size, across tensors and within them, and there is memory for three on the device.
While one is updated, the one before is on its way back and the next ones are coming::

    coming    bucket 0, bucket 1, bucket 2, bucket 3, ...
    update              bucket 0, bucket 1, bucket 2, ...
    leaving                       bucket 0, bucket 1, ...

An update works element by element, so where tensors are cut changes no bit. Pieces begin at multiples of :data:`ALIGNMENT`
elements, as kernels that read several numbers at once like it. A step takes as long as the copies of one direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hp_optim.offload.transfers import Transfers
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor

NUM_SLOTS = 3
"""Buckets on the device at a time."""
BUCKET_NBYTES = 64 * 2**20
"""Bytes of state in a bucket, where the caller names no others."""
OFFLOAD_BUCKET = "offload_bucket"
"""Key of a group."""
ALIGNMENT = 128
"""Elements."""
Lists = Sequence[Sequence[Tensor]]


class Piece(NamedTuple):
    """Some elements of a tensor."""

    number: int
    """Of the tensor."""
    start: int
    length: int
    offset: int
    """In the bucket, in elements."""


def buckets_of(numels: Sequence[int], is_cut: Sequence[bool], room: int) -> list[list[Piece]]:
    """All elements of tensors of ``numels`` elements, in buckets of ``room`` elements, which is a multiple of :data:`ALIGNMENT`.

    What may not be cut and is larger has a bucket of its own.
    """
    buckets: list[list[Piece]] = []
    end = room
    for number, (numel, may_cut) in enumerate(zip(numels, is_cut, strict=True)):
        start = 0
        while start < numel:
            left = numel - start
            if end >= room or (not may_cut and end + left > room):
                buckets.append([])
                end = 0
            length = min(left, room - end) if may_cut else left
            buckets[-1].append(Piece(number, start, length, end))
            start = start + length
            end = end + -(-length // ALIGNMENT) * ALIGNMENT
    return buckets


class Slot:
    """Memory of the device for one bucket."""

    def __init__(self, rows: list[Tensor]) -> None:
        self.rows = rows
        """One of each kind of state."""
        self.stored: Any = None
        """The event behind which it may be filled again."""


class Streamed:
    """Tensors whose state passes through the device once."""

    def __init__(
        self, platform: Platform, transfers: Transfers, device: str, nbytes: int, beside: Lists, state: Lists
    ) -> None:
        """``nbytes``: of a bucket. ``beside``: lists of tensors on ``device``. ``state``: lists of as many tensors of the same shapes,
        contiguous and in the host's memory, of one dtype.
        """
        self._platform, self._transfers, self._device = platform, transfers, device
        self._shapes = [tuple(x.shape) for x in beside[0]]
        self._is_cut = [platform.is_contiguous(x) for x in beside[0]]
        self._beside = [[self._flat(x, number) for number, x in enumerate(xs)] for xs in beside]
        self._state = [[platform.reshape(x, (-1,)) for x in xs] for xs in state]
        self._dtype = state[0][0].dtype
        room = max(1, nbytes // (platform.itemsize(self._dtype) * len(state)) // ALIGNMENT) * ALIGNMENT
        self.buckets = buckets_of([math.prod(shape) for shape in self._shapes], self._is_cut, room)

    def run(self, update: Callable[[Lists, Lists], None]) -> None:
        """Call ``update(beside, state)`` for the pieces of every bucket, with state on the device, and bring back what has become of it.

        Memory: at most :data:`NUM_SLOTS` buckets. The host does not wait. See [Note: who waits for whom].
        """
        transfers, num = self._transfers, len(self.buckets)
        slots = self._slots()
        begun = transfers.present()

        def fetch(number: int) -> Any:
            slot = slots[number % len(slots)]
            return transfers.fetch(self._pairs(number, slot), [begun if slot.stored is None else slot.stored])

        ahead = max(0, len(slots) - 1)
        try:
            coming = [fetch(number) for number in range(ahead)]
            for number in range(num):
                if number + ahead < num:
                    coming.append(fetch(number + ahead))
                transfers.wait(coming[number])
                slot = slots[number % len(slots)]
                update(*self._pieces(number, slot))
                back = [(on_host, on_device) for on_device, on_host in self._pairs(number, slot)]
                slot.stored = transfers.store(back, [transfers.present()])
        finally:  # also if an update or a copy fails: the memory of the slots is dropped
            transfers.settle()

    def _slots(self) -> list[Slot]:
        size = max((bucket[-1].offset + bucket[-1].length for bucket in self.buckets), default=0)
        return [
            Slot([self._platform.empty((size,), self._dtype, self._device) for _ in self._state])
            for _ in range(min(NUM_SLOTS, len(self.buckets)))
        ]

    def _pairs(self, number: int, slot: Slot) -> list[tuple[Tensor, Tensor]]:
        """Of a bucket, state on the device and on the host."""
        narrow = self._platform.narrow
        return [
            (narrow(row, 0, p.offset, p.length), narrow(xs[p.number], 0, p.start, p.length))
            for row, xs in zip(slot.rows, self._state, strict=True)
            for p in self.buckets[number]
        ]

    def _pieces(self, number: int, slot: Slot) -> tuple[Lists, Lists]:
        """Of a bucket, what is updated and the state beside it."""
        platform, is_cut, bucket = self._platform, self._is_cut, self.buckets[number]
        beside = [
            [
                platform.narrow(xs[p.number], 0, p.start, p.length) if is_cut[p.number] else xs[p.number]
                for p in bucket
            ]
            for xs in self._beside
        ]
        state = []
        for row in slot.rows:
            parts = [platform.narrow(row, 0, p.offset, p.length) for p in bucket]
            state.append(
                [
                    part if is_cut[p.number] else platform.reshape(part, self._shapes[p.number])
                    for part, p in zip(parts, bucket, strict=True)
                ]
            )
        return beside, state

    def _flat(self, x: Tensor, number: int) -> Tensor:
        """In a row if the tensor that is updated lies so; one beside it is copied if need be."""
        platform = self._platform
        # What is updated must not become a copy, as MindSpore's contiguous() makes of a part of a row.
        if not self._is_cut[number] or (len(self._shapes[number]) == 1 and platform.is_contiguous(x)):
            return x
        return platform.reshape(x if platform.is_contiguous(x) else platform.contiguous(x), (-1,))
