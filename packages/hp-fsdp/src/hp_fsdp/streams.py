"""The queues of a model: computation, gathers, reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_platform import dropped, keeping
from hp_platform.platform import Platform
from hp_platform.protocols.device import Event, Stream


class Streams:
    """[Note: memory and streams] Whole parameters and buffers of reductions are allocated and freed by the computation's
    stream. A side stream waits for that stream when it is given work, and the computation waits for the side stream before
    it touches what came of it, or frees it. So memory goes round in the order of the computation: what is gathered while
    unit k runs lies where unit k - 1 was, nothing is recorded on streams, and the allocator is never asked to guess.

    Whoever is dropped in the middle, with a model after an exception or by a user who changed plans, waits for nothing: then the
    computation's stream waits for it on the device, so that nobody gets memory in which a side stream still works; see
    :meth:`Task.__del__`.

    Where a device has no streams (cpu), a collective runs in the backend's threads, and what follows it is done when somebody
    waits for it: see :meth:`run`.
    """

    def __init__(self, platform: Platform, device: str) -> None:
        self.platform = platform
        self.device = platform.device(device)
        self.are_real = platform.supports("streams", device)
        self.async_op = not self.are_real
        """How collectives are started inside of :meth:`run`: on a side stream they may run in its order."""
        self.gather: Any = self.device.new_stream(high_priority=True)
        self.reduce: Any = self.device.new_stream(high_priority=True)
        self.after_reduce: Any = self.device.new_stream(high_priority=True)
        """What takes long behind a reduction (replicas, copies to the host), so that the next reduction need not wait for it."""

    def run(self, stream: Any, start: Callable[[], Callable[[], None]], follow_on: Any = None) -> Task:
        """Call ``start`` on ``stream``, behind what the computation has been given so far.

        It launches collectives and returns what has to follow them: on a stream that is queued at once, behind them on
        ``stream`` or on ``follow_on``; elsewhere it is done by the one who waits.
        """
        if not self.are_real:
            return Task(self, keeping.unkept(start))
        computation = self.device.current_stream()
        stream.wait_stream(computation)
        try:
            with self.device.use_stream(stream):
                follow = keeping.unkept(start)
                if follow_on is None:
                    follow()
                    return Task(self, None, stream.record_event(), computation)
            follow_on.wait_stream(stream)
            with self.device.use_stream(follow_on):
                follow()
                return Task(self, None, follow_on.record_event(), computation)
        except BaseException:  # something may have begun, and nobody has a task to wait for
            for side in (stream, follow_on):
                if side is not None:
                    dropped.wait_for_stream(computation, side)
            raise


class Task:
    """Something under way on a side stream, or in the backend's threads."""

    __slots__ = ("_computation", "_event", "_follow", "_streams", "_waited")

    def __init__(
        self,
        streams: Streams,
        follow: Callable[[], None] | None,
        event: Event | None = None,
        computation: Stream | None = None,
    ) -> None:
        """``event``: its end on a side stream, if there is one; ``computation``: the stream whose memory it works in then."""
        self._streams = streams
        self._follow = follow
        self._event = event
        self._computation = computation
        self._waited = False

    def __del__(self) -> None:
        """Nobody asks for what it does any more. In any thread; the host waits for nothing."""
        if self._event is not None and self._computation is not None and not self._waited:
            dropped.wait_for_event(self._computation, self._event)

    def wait(self) -> None:
        """Later work of the computation comes after it. The host waits only where there are no streams."""
        if self._event is not None and not self._waited:
            current = self._streams.device.current_stream()
            current.wait_event(self._event)
            # Another stream's wait keeps nobody out of the computation's memory.
            self._waited = current == self._computation
        if self._follow is not None:
            follow, self._follow = self._follow, None
            with self._streams.platform.no_grad():
                follow()

    def synchronize(self) -> None:
        """The host waits until it is over on the side stream."""
        if self._event is not None:
            self._event.synchronize()
