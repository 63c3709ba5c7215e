"""Copies between ranks that are made again and again: what depends on their sizes and fixed places is made once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

MAX_KNOWN = 64
"""Sets of addresses that are kept. Memory from a caching allocator comes back to few places."""


class _Moving:
    """Addresses of parts of memory that may lie elsewhere every time."""

    def __init__(self, parts: Sequence[tuple[int, int]]) -> None:
        """Of each part, which of the memories it lies in, and its first byte there."""
        self._parts = list(parts)
        self._known: dict[tuple[int, ...], array[int]] = {}

    def at(self, starts: tuple[int, ...]) -> array[int]:
        """For memories that start there."""
        found = self._known.get(starts)
        if found is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            found = array("Q", [starts[memory] + byte for memory, byte in self._parts])
            self._known[starts] = found
        return found


class _Fixed:
    """Of places that never move: their addresses and bytes."""

    def __init__(self, places: Sequence[torch.Tensor]) -> None:
        self._kept = (
            array("Q", [place.data_ptr() for place in places]),
            array("Q", [place.nbytes for place in places]),
        )
        self.addresses, self.nbytes = (each.buffer_info()[0] for each in self._kept)
        self.count = len(places)


class Pull:
    """Other ranks' parts come into tensors of this rank."""

    def __init__(
        self, batches: Any, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        """``batches``: :class:`~hp_platform.torch.device._copy_batches.CopyBatches`, or None."""
        self._batches = batches
        self._pairs = [pair for pair in zip(targets, sources, strict=True) if pair[1].numel()]
        self._fixed = _Fixed([source for _, source in self._pairs])
        storages: dict[int, int] = {}
        self._firsts: list[torch.Tensor] = []
        """One tensor of each storage, which tells where that lies."""
        parts = []
        for target, _ in self._pairs:
            memory = storages.setdefault(target.untyped_storage()._cdata, len(storages))
            if memory == len(self._firsts):
                self._firsts.append(target)
            first = self._firsts[memory].storage_offset()
            parts.append((memory, (target.storage_offset() - first) * target.itemsize))
        self._moving = _Moving(parts)

    def __call__(self) -> None:
        """Copy on the current stream."""
        if not self._pairs:
            return
        fixed = self._fixed
        if self._batches is not None:
            targets = self._moving.at(tuple([first.data_ptr() for first in self._firsts]))
            device = self._firsts[0].device.index
            if self._batches.run(
                targets.buffer_info()[0], fixed.addresses, fixed.nbytes, fixed.count, device
            ):
                return
        with torch.no_grad():
            for target, source in self._pairs:
                target.copy_(source)


class Push:
    """Parts of tensors of this rank go to places at other ranks."""

    def __init__(
        self, batches: Any, places: Sequence[torch.Tensor], parts: Sequence[tuple[int, int]]
    ) -> None:
        """``batches`` as of :class:`Pull`; ``parts``: of each, which of the tensors it lies in, and its first element there."""
        self._batches = batches
        pairs = [pair for pair in zip(places, parts, strict=True) if pair[0].numel()]
        self._places, self._parts = [place for place, _ in pairs], [part for _, part in pairs]
        self._fixed = _Fixed(self._places)
        self._moving = _Moving([(number, start * place.itemsize) for place, (number, start) in pairs])

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy on the current stream. 1-D and contiguous, in the dtype of the places; to be kept until the stream has done it."""
        if not self._places:
            return
        fixed = self._fixed
        if self._batches is not None:
            sources = self._moving.at(tuple([x.data_ptr() for x in tensors]))
            device = tensors[0].device.index
            if self._batches.run(
                fixed.addresses, sources.buffer_info()[0], fixed.nbytes, fixed.count, device
            ):
                return
        with torch.no_grad():
            for place, (number, start) in zip(self._places, self._parts, strict=True):
                place.copy_(tensors[number].narrow(0, start, place.shape[0]))
