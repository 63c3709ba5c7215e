"""Copies between a device and the host's memory, beside the computation and in both directions at a time.

[Note: who waits for whom] The computation is the stream that is current when a step is made. What comes has a stream of its own, and
so has what leaves: a link to the host carries as much in each direction at once. A copy waits for the events that it is given,
the computation for copies where it is told to; the host waits for nothing, until somebody looks at the state
(:meth:`Transfers.land`). Memory of the device belongs to the computation: before it is dropped, the computation has been told to
wait for all copies that touch it, in a step that fails, too (:meth:`Transfers.settle`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hp_platform.platform import Platform, require
from hp_platform.protocols.device import Event, Stream
from hp_platform.protocols.tensor import DType, Tensor

HOST = "cpu"
Pairs = Sequence[tuple[Tensor, Tensor]]
"""``(target, source)`` of equal shape and dtype."""


class Transfers(Protocol):
    """How one device exchanges state with the host."""

    def empty_on_host(self, shape: Sequence[int], dtype: DType) -> Tensor:
        """Uninitialised memory of the host that copies need not wait for."""
        ...

    def is_on_host(self, x: Tensor) -> bool:
        """Whether ``x`` lies in such memory."""
        ...

    def present(self) -> Any:
        """An event behind what the computation has been given so far."""
        ...

    def fetch(self, pairs: Pairs, after: Sequence[Any]) -> Any:
        """Copy from the host to the device, behind ``after``; an event behind the copies."""
        ...

    def store(self, pairs: Pairs, after: Sequence[Any]) -> Any:
        """Copy from the device to the host, likewise."""
        ...

    def wait(self, event: Any) -> None:
        """Later work of the computation comes after the event."""
        ...

    def settle(self) -> None:
        """Later work of the computation comes after all copies so far, also after those of a call that failed when some had begun."""
        ...

    def land(self) -> None:
        """The host waits until all that was stored is there."""
        ...


class StreamTransfers:
    """On two streams of the device."""

    def __init__(self, platform: Platform, device: str) -> None:
        self._platform = platform
        self._device = platform.device(device)
        self._coming, self._leaving = self._device.new_stream(), self._device.new_stream()
        self._stored: Event | None = None

    def empty_on_host(self, shape: Sequence[int], dtype: DType) -> Tensor:
        """Page-locked."""
        return self._device.empty_pinned(shape, dtype)

    def is_on_host(self, x: Tensor) -> bool:
        """Whether it is page-locked."""
        return self._device.is_pinned(x)

    def present(self) -> Event:
        """Of the current stream."""
        return self._device.current_stream().record_event()

    def fetch(self, pairs: Pairs, after: Sequence[Event]) -> Event:
        """On the stream of what comes."""
        return self._copy(self._coming, pairs, after)

    def store(self, pairs: Pairs, after: Sequence[Event]) -> Event:
        """On the stream of what leaves."""
        try:
            self._stored = self._copy(self._leaving, pairs, after)
        except BaseException:  # some may have begun
            self._stored = self._leaving.record_event()
            raise
        return self._stored

    def wait(self, event: Event) -> None:
        """On the current stream."""
        self._device.current_stream().wait_event(event)

    def settle(self) -> None:
        """On the current stream."""
        current = self._device.current_stream()
        for side in (self._coming, self._leaving):
            current.wait_stream(side)

    def land(self) -> None:
        """For the last store: they are in order."""
        if self._stored is not None:
            self._stored.synchronize()
            self._stored = None

    def _copy(self, stream: Stream, pairs: Pairs, after: Sequence[Event]) -> Event:
        for event in after:
            stream.wait_event(event)
        with self._device.use_stream(stream):
            targets, sources = [target for target, _ in pairs], [source for _, source in pairs]
            self._platform.foreach_copy_(targets, sources, non_blocking=True)
            return stream.record_event()


def transfers_of(platform: Platform, device: str) -> Transfers | None:
    """None for a device without a memory of its own. NotImplementedError for one where nothing is copied into parts of a tensor."""
    if not platform.supports("streams", device):
        return None
    require(platform, "write_into_view", device, what="offload_state=True")
    return StreamTransfers(platform, device)
