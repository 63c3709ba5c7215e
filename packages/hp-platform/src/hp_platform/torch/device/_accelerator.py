"""What torch.cuda and torch.npu have in common: one handle over either module of functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from hp_platform.protocols.device import Event, Repeated, Stream
from hp_platform.repeated import MOST_KEPT, WorkAsItIs
from hp_platform.torch._dtypes import resolve
from hp_platform.torch.device._profiling import profiler_range


class AcceleratorDevice:
    """Base of the handles of devices with streams and an allocator of their own."""

    name: str
    peer_nbytes = 0

    def _api(self) -> Any:
        """The module of functions, ``torch.cuda`` or its like. Only called while the device is available."""
        raise AssertionError("each device names its own module")

    def _event_type(self) -> type:
        """The module's Event with ``elapsed_ms``."""
        raise AssertionError("each device names its own event")

    def count(self) -> int:
        """How many devices this process sees."""
        return self._api().device_count()

    def current(self) -> str:
        """The current device with its index."""
        return f"{self.name}:{self._api().current_device()}"

    def set_current(self, index: int) -> None:
        """Choose the current device. ValueError for an index that is not there."""
        if not 0 <= index < self.count():
            raise ValueError(
                f"set_current({index}): this process sees {self.count()} {self.name} devices; pass 0 to {self.count() - 1}"
            )
        self._api().set_device(index)

    def synchronize(self) -> None:
        """Wait for the current device."""
        self._api().synchronize()

    def new_stream(self, *, high_priority: bool = False) -> Stream:
        """A new stream of the current device."""
        return self._api().Stream(priority=-1 if high_priority else 0)

    def current_stream(self) -> Stream:
        """The current stream."""
        return self._api().current_stream()

    def use_stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Make a stream the current one."""
        return self._api().stream(stream)

    def new_event(self, *, timing: bool = False) -> Event:
        """A new event."""
        return self._event_type()(enable_timing=timing)

    def empty_pinned(self, shape: Sequence[int], dtype: Any) -> torch.Tensor:
        """Page-locked memory of the host."""
        return torch.empty(shape, dtype=resolve(dtype), pin_memory=True)

    def is_pinned(self, x: torch.Tensor) -> bool:
        """Whether it is page-locked."""
        return x.device.type == "cpu" and x.is_pinned()

    def record_stream(self, x: torch.Tensor, stream: Stream) -> None:
        """Keep the memory of ``x`` until ``stream`` is past its present end."""
        x.record_stream(stream)

    def memory_allocated(self) -> int:
        """Bytes in tensors, peer memory among them."""
        # The module's own function sorts all of the allocator's figures to give one.
        figures = self._api().memory_stats_as_nested_dict()
        allocated: int = figures["allocated_bytes"]["all"]["current"] if figures else 0
        return allocated + self.peer_nbytes

    def max_memory_allocated(self) -> int:
        """Most bytes in tensors since the last reset."""
        return self._api().max_memory_allocated() + self.peer_nbytes

    def reset_peak_memory(self) -> None:
        """Start the measurement anew."""
        self._api().reset_peak_memory_stats()

    def memory_stats(self) -> Mapping[str, Any]:
        """The allocator's figures."""
        return self._api().memory_stats()

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = self._api().mem_get_info()
        return free, total

    def empty_cache(self) -> None:
        """Give cached memory back."""
        self._api().empty_cache()

    profiler_range = staticmethod(profiler_range)

    def repeated(self, most_kept: int = MOST_KEPT, *, makes_products: bool = True) -> Repeated:
        """Nothing is recorded."""
        return WorkAsItIs()

    def get_rng_state(self, device: str) -> Any:
        """State of a device's generator."""
        return self._api().get_rng_state(device)

    def set_rng_state(self, state: Any, device: str) -> None:
        """Put a state back."""
        self._api().set_rng_state(state, device)

    def fused_updates(self) -> Any:
        """None: torch's functions for lists."""
        return None

    def fused_scores(self) -> Any:
        """No kernels of ours."""
        return None

    def fused_draws(self) -> Any:
        """No kernels of ours."""
        return None

    def peer_domain(self) -> str | None:
        """Nothing is known of other devices."""
        return None

    def copy_batches(self) -> Any:
        """Copies are made one by one."""
        return None

    def fused_rows(self) -> Any:
        """Torch's."""
        return None
