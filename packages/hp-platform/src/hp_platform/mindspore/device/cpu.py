"""The processor under MindSpore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
from mindspore import mint

from hp_platform.host_device import HostDevice
from hp_platform.mindspore._dtypes import resolve
from hp_platform.mindspore._private import executor


class CpuDevice(HostDevice):
    """Handle of ``"cpu"``."""

    comm_backend = "mccl"
    missing = frozenset(
        {
            "stand_ins",
            "traced_collectives",
            "undefined_gradients",
            "backward_turns",
            "bfloat16_compute",
            "in_place_arithmetic",
            "coalesced",
            "peer_memory",
            "fused_adamw",
            "recorded_work",
            "numbers_on_device",
            "out_products",
            "exchange",
            "streams",
            "memory_stats",
            "version_counter",
            "double_backward",  # see [Note: second derivatives] in hp_platform.mindspore._autograd
            "torch_checkpoint",
            "optimizer_state",
            "function_modes",
            "operation_dispatch",
            "async_collectives",  # see [Note: operations on CPU are launched blocking]
        }
    )

    def empty_pinned(self, shape: Sequence[int], dtype: Any) -> mindspore.Tensor:
        """Plain memory: nothing is copied to another device."""
        return mint.empty(tuple(shape), dtype=resolve(dtype))

    def why_not(self) -> str:
        """There is always a processor."""
        return "it is"

    def synchronize(self) -> None:
        """Wait for MindSpore's own threads, which run behind the program. Raises what failed there.

        ``mindspore.runtime.synchronize`` logs an error on CPU at its first call and does nothing.
        """
        executor.sync()
