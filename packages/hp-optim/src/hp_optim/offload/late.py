"""Transfers on a device without a memory of its own, for tests: every copy happens as late as it may.

A copy is made when the computation or another copy waits for it or for a later one of its direction. What leaves is seen on the host when
that has waited, too, or when something comes again. Memory that nothing was copied into yet is full of NaN. So a wait that is
missing gives wrong numbers, on every machine, every time. What is missing between a fetch and a store before it shows where what
comes is early: :class:`EarlyFetches`. (That a copy waits for the computation cannot be seen where that is done at once.)
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from hp_optim.offload.transfers import HOST, Pairs
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import DType, Tensor


class _Copies:
    """Those of one call, and the event behind them."""

    def __init__(self, queue: deque[_Copies], pairs: Pairs, after: Sequence[Any]) -> None:
        self.queue, self.pairs, self.after = queue, pairs, after
        self.is_done = False


class LateTransfers:
    """See :class:`hp_optim.offload.transfers.Transfers`."""

    def __init__(self, platform: Platform, device: str) -> None:
        self._platform, self._device = platform, device
        self._coming: deque[_Copies] = deque()
        self._leaving: deque[_Copies] = deque()
        self._memories: list[tuple[weakref.ref[Any], int, int]] = []
        self._unseen: list[tuple[Tensor, Tensor]] = []
        """What has left, and where it belongs on the host."""
        self.log: list[str] = []
        """What was asked for: ``"fetch"``, ``"store"``, ``"land"``."""
        self.nbytes = {"fetch": 0, "store": 0}

    def empty_on_host(self, shape: Sequence[int], dtype: DType) -> Tensor:
        """Full of NaN."""
        made = self._platform.full(tuple(shape), math.nan, dtype, HOST)
        start = self._platform.data_ptr(made)
        nbytes = math.prod(tuple(shape)) * self._platform.itemsize(made.dtype)
        self._memories.append((weakref.ref(made), start, start + nbytes))
        return made

    def is_on_host(self, x: Tensor) -> bool:
        """Whether it is in memory of :meth:`empty_on_host` that somebody holds."""
        at = self._platform.data_ptr(x)
        return any(ref() is not None and start <= at < stop for ref, start, stop in self._memories)

    @property
    def num_waiting(self) -> int:
        """Copies that nobody has waited for."""
        return len(self._coming) + len(self._leaving)

    def present(self) -> None:
        """The computation is done at once."""
        return

    def fetch(self, pairs: Pairs, after: Sequence[Any]) -> Any:
        """In the queue."""
        return self._queued("fetch", self._coming, pairs, after)

    def store(self, pairs: Pairs, after: Sequence[Any]) -> Any:
        """In the queue."""
        return self._queued("store", self._leaving, pairs, after)

    def wait(self, event: Any) -> None:
        """All of its direction up to the event, and what those wait for."""
        while event is not None and not event.is_done:
            first = event.queue[0]
            for other in first.after:
                self.wait(other)
            if first.queue is self._leaving:
                self._unseen.extend((target, self._platform.clone(source)) for target, source in first.pairs)
            else:
                self._show()
                for target, source in first.pairs:
                    self._platform.copy_(target, source)
            first.is_done = True
            event.queue.popleft()

    def settle(self) -> None:
        """All of both directions."""
        for queue in (self._coming, self._leaving):
            if queue:
                self.wait(queue[-1])

    def land(self) -> None:
        """All that leaves."""
        self.log.append("land")
        if self._leaving:
            self.wait(self._leaving[-1])
        self._show()

    def _show(self) -> None:
        for target, value in self._unseen:
            self._platform.copy_(target, value)
        self._unseen.clear()

    def _queued(self, what: str, queue: deque[_Copies], pairs: Pairs, after: Sequence[Any]) -> _Copies:
        self.log.append(what)
        sizes = (math.prod(tuple(x.shape)) * self._platform.itemsize(x.dtype) for x, _ in pairs)
        self.nbytes[what] = self.nbytes[what] + sum(sizes)
        copies = _Copies(queue, list(pairs), [event for event in after if event is not None])
        queue.append(copies)
        return copies


class EarlyFetches(LateTransfers):
    """What comes, comes as soon as what it waits for is done; what leaves is late."""

    def fetch(self, pairs: Pairs, after: Sequence[Any]) -> Any:
        """At once."""
        event = super().fetch(pairs, after)
        self.wait(event)
        return event


TIMINGS = (LateTransfers, EarlyFetches)
