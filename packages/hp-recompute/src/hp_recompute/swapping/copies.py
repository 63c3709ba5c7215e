"""Copies between a device and the host, beside the computation.

[Note: memory and the copy stream] Memory of the device is allocated and freed by the computation's stream. A copy to the host reads what
is held until the computation has been told to wait for the copy; a copy to the device writes to memory that is held until the same
(by the copies themselves). So the allocator is never asked to guess, and the host never waits. Only what is dropped before anybody has
waited (with a graph, by a user or an error in the middle, in any thread) is left to it: it keeps such memory from others until the
copies are past it (:meth:`Copies.let_go`). Memory of the host is only touched by copies, all in the order of one stream, also those that
were asked for on another: it may be given to the next one as soon as nobody wants what is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Protocol

from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor


class Copies(Protocol):
    """How one device exchanges bytes with the host."""

    def empty_on_host(self, nbytes: int) -> Tensor:
        """``(nbytes,)`` uint8."""
        ...

    def empty_on_device(self, nbytes: int) -> Tensor:
        """``(nbytes,)`` uint8."""
        ...

    def in_use(self) -> int | None:
        """Bytes of the device in all tensors, as the program has given them out and taken them back so far; None: nobody counts."""
        ...

    def to_host(self, pairs: Sequence[tuple[Tensor, Tensor]], stream: Any = None) -> Any:
        """Copy for each pair ``(target, source)``, behind what the computation has been given so far; an event behind all of them.

        ``stream``: where, instead of the one of copies; all copies wait for those before all the same. Who asks holds the
        sources until it has waited.
        """
        ...

    def to_device(self, pairs: Sequence[tuple[Tensor, Tensor]], stream: Any = None) -> Any:
        """Likewise. The targets are held until the event, whoever drops them."""
        ...

    def let_go(self, xs: Sequence[Tensor]) -> None:
        """The caller waits for no copy of these, on the device: nobody gets their memory before all copies so far are over.

        In any thread, and in finalizers: no error comes of it.
        """
        ...

    def wait(self, event: Any) -> None:
        """Later work of the computation comes after the event."""
        ...


class StreamCopies:
    """On a stream of the device."""

    def __init__(self, platform: Platform, device: str) -> None:
        self._held: dict[int, tuple[Any, list[Tensor]]] = {}
        """By number. Threads come and go here, so nothing is done to it but what no other can divide."""
        self._numbers = count()
        self.platform, self.name = platform, device
        self.device = platform.device(device)
        self.stream = self.device.new_stream()
        self._uint8 = platform.dtype("uint8")
        self._is_counted = platform.supports("memory_stats", device)

    def __del__(self) -> None:
        """Nobody waits for what comes."""
        self.let_go([target for _, targets in self._held.values() for target in targets])

    def empty_on_host(self, nbytes: int) -> Tensor:
        """Page-locked."""
        return self.device.empty_pinned((nbytes,), self._uint8)

    def empty_on_device(self, nbytes: int) -> Tensor:
        """Of the current stream."""
        return self.platform.empty((nbytes,), self._uint8, self.name)

    def in_use(self) -> int | None:
        """As the allocator counts."""
        return self.device.memory_allocated() if self._is_counted else None

    def to_host(self, pairs: Sequence[tuple[Tensor, Tensor]], stream: Any = None) -> Any:
        """On the stream of copies, or another one in its order."""
        return self._start(pairs, stream)

    def to_device(self, pairs: Sequence[tuple[Tensor, Tensor]], stream: Any = None) -> Any:
        """On the stream of copies, or another one in its order."""
        targets = [target for target, _ in pairs]
        try:
            event = self._start(pairs, stream)
        except BaseException:  # some may have begun
            self.let_go(targets)
            raise
        self._held[next(self._numbers)] = event, targets
        return event

    def let_go(self, xs: Sequence[Tensor]) -> None:
        """The allocator is told; see [Note: memory and the copy stream]."""
        with suppress(Exception):  # of a device that has failed, or a process that ends
            for x in xs:
                self.device.record_stream(x, self.stream)

    def wait(self, event: Any) -> None:
        """On the current stream."""
        self.device.current_stream().wait_event(event)
        for number, (each, _) in self._held.copy().items():
            if each is event or each.query():
                self._held.pop(number, None)

    def _start(self, pairs: Sequence[tuple[Tensor, Tensor]], given: Any) -> Any:
        stream = self.stream if given is None else given
        stream.wait_stream(self.device.current_stream())
        if given is not None:
            stream.wait_stream(self.stream)
        try:
            with self.device.use_stream(stream):
                for target, source in pairs:
                    self.platform.copy_(target, source, non_blocking=True)
        finally:  # all copies come after what an error cuts short, too
            event = stream.record_event()
            if given is not None:
                self.stream.wait_event(event)
        return event


MakeCopies = Callable[[Platform, str], Copies | None]
"""How a device is copied from and to."""


def copies_on_streams(platform: Platform, device: str) -> Copies | None:
    """None for a device without a memory of its own, from which nothing is copied."""
    return StreamCopies(platform, device) if platform.supports("streams", device) else None
