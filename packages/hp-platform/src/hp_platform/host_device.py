"""The processor as a device: what its handle says is the same for every framework, so it stands here once.

It has no queues: work is done when the call returns (or in the framework's own threads, in order), so streams and events
only keep the shape of programs that use them, and memory is that of the process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from hp_platform.protocols.device import Event, Repeated, Stream
from hp_platform.protocols.tensor import Tensor
from hp_platform.repeated import MOST_KEPT, WorkAsItIs


class HostEvent:
    """A point in the host's time."""

    def __init__(self, *, timing: bool = False) -> None:
        self._timing = timing
        self._recorded_at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Note the time, if this event was made for timing."""
        if self._timing:
            self._recorded_at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """What was before this event is done already."""

    def query(self) -> bool:
        """Always true."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_ms(self, end: Event) -> float:
        """Milliseconds by the host's clock from this event's :meth:`record` to that of ``end``.

        RuntimeError unless both were made with ``timing=True`` and recorded.
        """
        if not isinstance(end, HostEvent) or self._recorded_at is None or end._recorded_at is None:
            raise RuntimeError(
                "elapsed_ms needs two recorded events of one device made with timing=True; "
                "make them with new_event(timing=True) and call record() on both"
            )
        return (end._recorded_at - self._recorded_at) * 1e3


class HostStream:
    """The one queue of the host, which is always empty."""

    def wait_stream(self, other: Stream) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new one, and return it."""
        event = event or HostEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Nothing to wait for."""


class HostDevice:
    """Handle of ``"cpu"``. A backend derives from it to name its communication backend and its profiler."""

    name: str = "cpu"
    comm_backend: str = "gloo"

    def __init__(self) -> None:
        self._stream = HostStream()

    def is_available(self) -> bool:
        """Always true."""
        return True

    def count(self) -> int:
        """One: the processor as a whole."""
        return 1

    def current(self) -> str:
        """``"cpu"``."""
        return "cpu"

    def set_current(self, index: int) -> None:
        """Accept the only index there is. ValueError for another."""
        if index != 0:
            raise ValueError(f"set_current({index}): a process has one cpu device; pass 0")

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def new_stream(self, *, high_priority: bool = False) -> HostStream:
        """A stream that does nothing."""
        return HostStream()

    def current_stream(self) -> HostStream:
        """The stream that does nothing, always the same one."""
        return self._stream

    def use_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """No effect."""
        return nullcontext()

    def new_event(self, *, timing: bool = False) -> HostEvent:
        """An event; with ``timing`` it notes the host's time when it is recorded."""
        return HostEvent(timing=timing)

    def is_pinned(self, x: Tensor) -> bool:
        """True: there is one kind of memory."""
        return True

    def record_stream(self, x: Tensor, stream: Stream) -> None:
        """No effect: memory is not reused while anything can still read it."""

    def memory_allocated(self) -> int:
        """Resident bytes of the process."""
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return resident_pages * os.sysconf("SC_PAGE_SIZE")

    def max_memory_allocated(self) -> int:
        """Highest resident bytes of the process so far."""
        import resource

        # Linux gives KiB. The kernel adds pages to this figure in batches, so it may lag behind the present one.
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return max(highest, self.memory_allocated())

    def reset_peak_memory(self) -> None:
        """No effect: the kernel keeps the peak of the process."""

    def memory_stats(self) -> Mapping[str, Any]:
        """Empty: host allocators do not count."""
        return {}

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the machine's memory."""
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def empty_cache(self) -> None:
        """No effect."""

    def repeated(self, most_kept: int = MOST_KEPT, *, makes_products: bool = True) -> Repeated:
        """Nothing is recorded."""
        return WorkAsItIs()

    def profiler_range(self, name: str) -> AbstractContextManager[None]:
        """No profiler is known here; backends put theirs."""
        return _unprofiled(name)


@contextmanager
def _unprofiled(name: str) -> Iterator[None]:
    yield
