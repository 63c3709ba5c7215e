"""What Ascend and GPU have in common under MindSpore: its runtime module. Not run on hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import mindspore
from mindspore import mint

from hp_platform.mindspore._dtypes import resolve
from hp_platform.protocols.device import Event, Repeated, Stream
from hp_platform.repeated import MOST_KEPT, WorkAsItIs


class AcceleratorDevice:
    """Base of the handles of devices with streams and an allocator of their own."""

    name: ClassVar[str]
    target: ClassVar[str]
    """MindSpore's name of the device."""
    comm_backend: str
    missing: ClassVar[frozenset[str]]

    def is_available(self) -> bool:
        """Whether this process' device target is of this kind."""
        return mindspore.get_current_device()[0] == self.target

    def why_not(self) -> str:
        """Why it is not available."""
        return f"MindSpore's device target is {mindspore.get_current_device()[0]}; choose with mindspore.set_device"

    def _module(self) -> Any:
        """MindSpore's module of functions for this kind of device."""
        return getattr(mindspore.device_context, self.target.lower())

    def count(self) -> int:
        """How many devices this process sees."""
        return self._module().device_count()

    def current(self) -> str:
        """The process' device with its index."""
        return f"{self.name}:{mindspore.get_current_device()[1]}"

    def set_current(self, index: int) -> None:
        """Choose the process' device, before its first use. ValueError for an index that is not there."""
        if not 0 <= index < self.count():
            raise ValueError(
                f"set_current({index}): this process sees {self.count()} {self.name} devices; pass 0 to {self.count() - 1}"
            )
        mindspore.set_device(self.target, index)

    def synchronize(self) -> None:
        """Wait for the device."""
        mindspore.runtime.synchronize()

    def new_stream(self, *, high_priority: bool = False) -> Stream:
        """A new stream."""
        return mindspore.runtime.Stream(priority=-1 if high_priority else 0)

    def current_stream(self) -> Stream:
        """The current stream."""
        return mindspore.runtime.current_stream()

    def use_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Make a stream the current one."""
        return mindspore.runtime.StreamCtx(stream)

    def new_event(self, *, timing: bool = False) -> Event:
        """A new event."""
        return _Event(enable_timing=timing)

    def empty_pinned(self, shape: Sequence[int], dtype: Any) -> mindspore.Tensor:
        """Page-locked memory of the host."""
        return mint.empty(tuple(shape), dtype=resolve(dtype), device="CPU", pin_memory=True)

    def is_pinned(self, x: mindspore.Tensor) -> bool:
        """Whether it is page-locked."""
        return str(x.device) == "CPU" and x.is_pinned()

    def record_stream(self, x: mindspore.Tensor, stream: Stream) -> None:
        """Wait for ``stream`` in the current one: MindSpore's allocator offers no way to hold a tensor for another stream."""
        del x
        mindspore.runtime.current_stream().wait_stream(stream)

    def memory_allocated(self) -> int:
        """Bytes in tensors."""
        return mindspore.runtime.memory_allocated()

    def max_memory_allocated(self) -> int:
        """Most bytes in tensors since the last reset."""
        return mindspore.runtime.max_memory_allocated()

    def reset_peak_memory(self) -> None:
        """Start the measurement anew."""
        mindspore.runtime.reset_peak_memory_stats()

    def memory_stats(self) -> Mapping[str, Any]:
        """The allocator's figures."""
        return mindspore.runtime.memory_stats()

    def memory_info(self) -> tuple[int, int]:
        """Total bytes of the device, and of these what this process' allocator has not reserved."""
        index = mindspore.get_current_device()[1]
        total = mindspore.hal.get_device_properties(index, self.target).total_memory
        return total - mindspore.runtime.memory_reserved(), total

    def empty_cache(self) -> None:
        """Give cached memory back."""
        mindspore.runtime.empty_cache()

    def repeated(self, most_kept: int = MOST_KEPT, *, makes_products: bool = True) -> Repeated:
        """Nothing is recorded."""
        return WorkAsItIs()

    def profiler_range(self, name: str) -> AbstractContextManager[None]:
        """No effect: MindSpore's profiler names ranges through marks of the vendor's tool."""
        return nullcontext()


class _Event(mindspore.runtime.Event):
    """An event whose time has the platform's name."""

    def elapsed_ms(self, end: Event) -> float:
        """Milliseconds to ``end``."""
        return self.elapsed_time(end)
