"""A device as a handle: ``platform.device("cuda")``. Streams and events do nothing where a device has none (cpu)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from hp_platform.protocols.tensor import DType, Tensor


class Event(Protocol):
    """A point in a stream's order."""

    def record(self, stream: Stream | None = None) -> None:
        """Mark the present end of ``stream`` (default: the current one)."""
        ...

    def wait(self, stream: Stream | None = None) -> None:
        """Let later work of ``stream`` begin after the marked point; the host goes on."""
        ...

    def query(self) -> bool:
        """Whether the marked point has been reached."""
        ...

    def synchronize(self) -> None:
        """Wait on the host."""
        ...

    def elapsed_ms(self, end: Event) -> float:
        """Milliseconds to ``end``; both made with ``timing=True``. On cpu measured by the host's clock at ``record``."""
        ...


class Stream(Protocol):
    """A queue of device work."""

    def wait_stream(self, other: Stream) -> None:
        """Later work here begins after what ``other`` holds now."""
        ...

    def wait_event(self, event: Event) -> None:
        """Later work here begins after ``event``."""
        ...

    def record_event(self, event: Event | None = None) -> Event:
        """Mark the present end of this stream."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until the queue is empty."""
        ...


class Repeated(Protocol):
    """Work that comes again on the same memory: see [Note: work that repeats] in :mod:`hp_platform.repeated`. For one thread at a time."""

    @property
    def failures(self) -> Mapping[Hashable, str]:
        """By name what could not be recorded, and why: it is done as it is."""
        ...

    @property
    def num_launched(self) -> int:
        """How often records were launched."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether just now nothing is recorded or launched that would be at other times: as while the caller records the current stream,
        when what is written on the device is not there afterwards.
        """
        ...

    def run(
        self,
        name: Hashable,
        tensors: Sequence[Tensor],
        work: Callable[[], None],
        written: Sequence[Tensor] = (),
    ) -> None:
        """Let the device do ``work``, or the record of an earlier ``work`` of this name, stream and tensors.

        ``work`` only starts work on the current stream, at least some: it allocates nothing, calls no collective, and does not wait. All
        memory that it reads and writes belongs to ``tensors``; all else that it depends on, numbers too, is said by ``name``, as long as
        this object lives. ``written``: those of whose writes others ask; they are counted whichever is done. What cannot be recorded is
        done as it is, under its name from then on, and a RuntimeWarning says so once. Memory of another device than the current one is
        not recorded.
        """
        ...


@runtime_checkable
class DeviceHandle(Protocol):
    """All that depends on the kind of device."""

    name: str
    """``"cpu"``, ``"cuda"`` or ``"npu"``."""
    comm_backend: str
    """The communication backend for tensors of this device: ``gloo``, ``nccl``, ``hccl`` or ``mccl``."""

    def is_available(self) -> bool:
        """Whether a device of this kind can be used in this process."""
        ...

    def count(self) -> int:
        """How many this process sees (cpu: 1)."""
        ...

    def current(self) -> str:
        """The device that new tensors go to, such as ``"cuda:3"`` or ``"cpu"``."""
        ...

    def set_current(self, index: int) -> None:
        """Choose the device of this process."""
        ...

    def synchronize(self) -> None:
        """Wait on the host for all work of the current device."""
        ...

    def new_stream(self, *, high_priority: bool = False) -> Stream:
        """A new queue."""
        ...

    def current_stream(self) -> Stream:
        """The queue that work goes to now."""
        ...

    def use_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Work inside goes to ``stream``."""
        ...

    def new_event(self, *, timing: bool = False) -> Event:
        """A new, unrecorded event."""
        ...

    def empty_pinned(self, shape: Sequence[int], dtype: DType) -> Tensor:
        """Uninitialised memory of the host, page-locked where this device copies from and to such memory without the host's
        waiting (``platform.copy_(..., non_blocking=True)``). On cpu, and where the framework cannot lock, plain memory.
        """
        ...

    def is_pinned(self, x: Tensor) -> bool:
        """Whether ``x`` lies in such memory of the host as :meth:`empty_pinned` gives. The host does not wait for a device."""
        ...

    def record_stream(self, x: Tensor, stream: Stream) -> None:
        """Tell the allocator that ``stream`` uses ``x``, so that its memory is not reused too early."""
        ...

    def memory_allocated(self) -> int:
        """Bytes in tensors now. On cpu the process' resident memory: the host allocators do not count (``supports("memory_stats")``)."""
        ...

    def max_memory_allocated(self) -> int:
        """Highest :meth:`memory_allocated` since the last reset. On cpu the highest resident memory."""
        ...

    def reset_peak_memory(self) -> None:
        """Start the measurement anew (no effect on cpu)."""
        ...

    def memory_stats(self) -> Mapping[str, Any]:
        """The allocator's own figures; empty on cpu."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the device."""
        ...

    def empty_cache(self) -> None:
        """Give cached memory back to the device."""
        ...

    def profiler_range(self, name: str) -> AbstractContextManager[None]:
        """A named range in the profiler's timeline."""
        ...

    def repeated(self, most_kept: int = ..., *, makes_products: bool = ...) -> Repeated:
        """For work that comes again: one launch for many where ``supports("recorded_work")``, else it is done as it is.

        ``most_kept``: records at a time, 128 by default; what comes beyond them is done as it is. One of a hundred launches takes some
        100 KB on the device. ``makes_products`` False promises that no work multiplies matrices, True by default: libraries keep memory for
        products, which records of them need as long as they live.
        """
        ...
