"""Where communication runs beside products.

[Note: communication goes first] Kernels of a product fill the device, and those of a collective, which need few multiprocessors,
then wait until the product ends: nothing overlaps. A product that follows in the same stream starts a little earlier than
a collective of another stream that has to see an event first. So the product is made to see an event too: one that the side
stream records just before the collective. The collective comes right behind it, and finds the device still free.

[Note: memory of the side stream] Buffers are made and dropped by the computation's stream. The side stream waits for it before a
launch, and it waits for the side stream before it drops what the launch reads or fills: until then the task, or the queue, holds
them. So the allocator need not be told of the side stream. Tasks and queues that nobody waits for, because a product between
failed, make the computation's stream wait when they are dropped: [Note: dropped in the middle] in :mod:`hp_platform.dropped`. What
allocates by itself (collectives of uneven pieces) is not launched there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_platform import dropped, get_platform
from hp_platform.collectives import Work
from hp_platform.on_platform import once

Tensor = Any


class Task:
    """A collective under way. It holds the tensors that the collective reads and fills."""

    __slots__ = ("_computation", "_device", "_event", "_held", "_work")

    def __init__(
        self, device: Any, held: Any, *, event: Any = None, computation: Any = None, work: Any = None
    ) -> None:
        """``event``: its end on the side stream, and ``computation`` the stream that ``held`` belongs to; else its ``work``."""
        self._device, self._held = device, held
        self._event, self._computation, self._work = event, computation, work

    def __del__(self) -> None:
        """Nobody waits for it any more. See [Note: memory of the side stream]."""
        if self._event is not None:
            dropped.wait_for_event(self._computation, self._event)

    def wait(self) -> None:
        """Later work of the current stream comes after it; where there are no streams the host waits."""
        if self._event is not None:
            self._device.current_stream().wait_event(self._event)
        if self._work is not None:
            self._work.wait()
        self._event = self._work = self._held = None


def run_beside(device_name: str, start: Callable[[bool], Any], held: Any) -> Task:
    """Launch a collective behind what the current stream holds, so that what the current stream is given next runs beside it.

    ``start(async_op)`` launches it, and allocates nothing; where the device has streams it is called on the side stream, with
    False. What it gives is waited for if it is a handle. See [Note: communication goes first].
    """
    platform = get_platform()
    device = platform.device(device_name)
    if not platform.supports("streams", device_name):
        return Task(device, held, work=start(True))
    current, side = device.current_stream(), _side_stream(device)
    side.wait_stream(current)
    with device.use_stream(side):
        ready = side.record_event()
        try:
            work = start(False)
            if isinstance(work, Work):
                work.wait()
        finally:  # also if it fails when it has begun
            task = Task(device, held, event=side.record_event(), computation=current)
    current.wait_event(ready)
    return task


class SideQueue:
    """The side stream, for several steps of which some wait for what is computed in between.

    Where a device has no streams, every step is done when it is queued.
    """

    __slots__ = ("_computation", "_device", "_held", "_is_waited_for", "_last", "_side")

    def __init__(self, device_name: str) -> None:
        self._is_waited_for = True
        """Whether the computation has been told to wait for all steps."""
        platform = get_platform()
        self._device = platform.device(device_name)
        self._side: Any = None
        self._computation: Any = None
        if platform.supports("streams", device_name):
            self._side, self._computation = _side_stream(self._device), self._device.current_stream()
        self._held: list[Tensor] = []
        self._last: Any = None
        """The mark behind all steps, if there is one."""

    def __del__(self) -> None:
        """Nobody waits for its steps any more. See [Note: memory of the side stream]."""
        if self._is_waited_for:
            return
        if self._last is not None:
            dropped.wait_for_event(self._computation, self._last)
        else:
            dropped.wait_for_stream(self._computation, self._side)

    def hold(self, *xs: Tensor) -> None:
        """Memory of the current stream in which steps work, until that waits for the mark behind all of them."""
        self._held.extend(xs)

    def run(self, step: Callable[[], None], *, is_behind: bool = True) -> None:
        """Queue ``step``, of whose memory :meth:`hold` has been told; with ``is_behind`` it also waits for what the current stream
        holds now.
        """
        if self._side is None:
            step()
            return
        if is_behind:
            self._side.wait_stream(self._device.current_stream())
        self._last, self._is_waited_for = None, False
        with self._device.use_stream(self._side):
            step()

    def mark(self) -> Any:
        """The present end of the queue, for :meth:`wait`."""
        self._last = None if self._side is None else self._side.record_event()
        return self._last

    def wait(self, mark: Any) -> None:
        """Let later work of the current stream come after the mark; the host goes on."""
        if mark is not None:
            self._device.current_stream().wait_event(mark)
        if mark is self._last:
            self._is_waited_for = True
            self._held.clear()


def _side_stream(device: Any) -> Any:
    streams = _side_streams()
    name = device.current()
    if name not in streams:
        streams[name] = device.new_stream(high_priority=True)
    return streams[name]


@once
def _side_streams(platform: Any) -> dict[str, Any]:
    """One per device. They hold no state of a program: whoever launches there has waited for it when it returns."""
    return {}
