"""The processor under PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hp_platform.host_device import HostDevice
from hp_platform.torch._dtypes import resolve
from hp_platform.torch.device._base import CommFacts
from hp_platform.torch.device._profiling import profiler_range

_GLOO_DTYPES = frozenset(
    {
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int8, torch.uint8,
    }
)  # fmt: skip


class CpuDevice(HostDevice):
    """Handle of ``"cpu"``."""

    comm_backend = "gloo"
    world_backend = "gloo"
    rounds_like_ieee = True
    missing = frozenset(
        {"coalesced", "peer_memory", "streams", "memory_stats", "recorded_work", "numbers_on_device"}
    )
    comm = CommFacts(
        # ProcessGroupGloo of torch 2.13 accepts AVG, that of 2.11 refuses it, and for integers it kills the launch.
        reduce_ops=frozenset({"sum", "max", "min", "prod"}),
        reducible=_GLOO_DTYPES | {torch.int16},
        movable=_GLOO_DTYPES,
        widened={torch.int16: torch.int32},
        coalesces=False,
        uneven_lists=False,
        scatters_by_exchange=True,
    )

    profiler_range = staticmethod(profiler_range)

    def empty_pinned(self, shape: Sequence[int], dtype: Any) -> torch.Tensor:
        """Plain memory: nothing is copied to another device."""
        return torch.empty(shape, dtype=resolve(dtype))

    def why_not(self) -> str:
        """There is always a processor."""
        return "it is"

    def get_rng_state(self, device: str) -> Any:
        """State of the host's generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: Any, device: str) -> None:
        """Put a state back."""
        torch.set_rng_state(state)

    peer_nbytes = 0

    def peer_domain(self) -> str | None:
        """Processes share no tensors."""
        return None

    def copy_batches(self) -> Any:
        """Copies are made one by one."""
        return None

    def fused_rows(self) -> Any:
        """Torch's."""
        return None

    def fused_updates(self) -> Any:
        """None: torch's functions for lists."""
        return None

    def fused_scores(self) -> Any:
        """No kernels of ours."""
        return None

    def fused_draws(self) -> Any:
        """No kernels of ours."""
        return None
