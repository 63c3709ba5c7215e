"""Swap on a device without a memory of its own, for tests: every copy happens as late as it may.

A copy is made when somebody waits for it, or for a later one. Memory that nothing was copied into yet is full of NaN, and what is copied
from memory that was freed before is NaN, too. So a wait that is missing gives wrong numbers, on every machine, every time.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor
from hp_recompute.swapping.manager import SwapManager, use_manager

_NAN = 255
"""As every byte of a float of any width."""


class LateCopies:
    """See :class:`hp_recompute.swapping.copies.Copies`."""

    def __init__(self, platform: Platform, device: str) -> None:
        self.platform, self.name = platform, device
        self._queue: deque[tuple[object, list[tuple[Any, Any]]]] = deque()
        self._held: list[tuple[Any, list[Tensor]]] = []
        self.num_copies = 0
        """That have happened."""

    def empty_on_host(self, nbytes: int) -> Tensor:
        """Full of NaN."""
        return self.platform.full((nbytes,), _NAN, "uint8", "cpu")

    def empty_on_device(self, nbytes: int) -> Tensor:
        """Full of NaN."""
        return self.platform.full((nbytes,), _NAN, "uint8", self.name)

    def in_use(self) -> int | None:
        """Not counted: the manager takes what its groups have there."""
        return None

    def to_host(self, pairs: Sequence[tuple[Tensor, Tensor]], stream: Any = None) -> Any:
        """In the queue, which does not hold memory of the device."""
        return self._queued([(lambda target=target: target, weakref.ref(source)) for target, source in pairs])

    def to_device(self, pairs: Sequence[tuple[Tensor, Tensor]], stream: Any = None) -> Any:
        """In the queue; the targets are held."""
        event = self._queued(
            [(weakref.ref(target), lambda source=source: source) for target, source in pairs]
        )
        self._held.append((event, [target for target, _ in pairs]))
        return event

    def let_go(self, xs: Sequence[Tensor]) -> None:
        """What is copied from memory that was freed is NaN here, for nobody."""

    def wait(self, event: Any) -> None:
        """All up to the event."""
        while any(event is each for each, _ in self._queue):
            _, pairs = self._queue.popleft()
            for target, source in pairs:
                self._copy(target(), source())
        self._held = [each for each in self._held if any(each[0] is event for event, _ in self._queue)]

    def _queued(self, pairs: list[tuple[Any, Any]]) -> Any:
        event = object()
        self._queue.append((event, pairs))
        return event

    def _copy(self, target: Tensor | None, source: Tensor | None) -> None:
        self.num_copies = self.num_copies + 1
        if target is None:
            raise AssertionError("bytes are copied into memory that was freed")
        if source is None:
            self.platform.fill_(target, _NAN)
        else:
            self.platform.copy_(target, source)


@contextmanager
def late_copies() -> Iterator[SwapManager]:
    """Inside, swap treats the cpu as a device: a manager of its own, whose copies are late."""
    with use_manager(SwapManager(copies=LateCopies)) as manager:
        yield manager
