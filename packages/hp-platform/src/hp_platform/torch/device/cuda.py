"""NVIDIA (and ROCm) devices. The only file that names torch.cuda."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hp_platform.torch.device._accelerator import AcceleratorDevice
from hp_platform.torch.device._base import CommFacts

_NCCL_DTYPES = frozenset(
    {
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int8, torch.uint8,
    }
)  # fmt: skip


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""The same in all containers of a machine, another on every machine."""


class _Event(torch.cuda.Event):
    def elapsed_ms(self, end: Any) -> float:
        """Milliseconds to ``end``."""
        return self.elapsed_time(end)


class CudaDevice(AcceleratorDevice):
    """Handle of ``"cuda"``."""

    name = "cuda"
    comm_backend = "nccl"
    world_backend = "cpu:gloo,cuda:nccl"
    rounds_like_ieee = True
    missing: frozenset[str] = frozenset()
    comm = CommFacts(
        reduce_ops=frozenset({"sum", "mean", "max", "min", "prod"}),
        reducible=_NCCL_DTYPES | {torch.int16},
        movable=_NCCL_DTYPES,
        widened={torch.int16: torch.int32},
        coalesces=True,
        uneven_lists=True,
        exchanges_lists=True,
    )

    def is_available(self) -> bool:
        """Whether torch sees a device."""
        return torch.cuda.is_available()

    def why_not(self) -> str:
        """Which part is missing."""
        if not torch.backends.cuda.is_built():
            return f"torch {torch.__version__} was built without CUDA"
        return "torch sees no CUDA device"

    def _api(self) -> Any:
        return torch.cuda

    def _event_type(self) -> type:
        return _Event

    @cached_property
    def _fused_draws(self) -> Any:
        # Triton comes with torch's CUDA builds; without it draws are composed.
        if importlib.util.find_spec("triton") is None:
            return None
        return importlib.import_module("hp_platform.torch._triton_launches").TritonDraws()

    def fused_draws(self) -> Any:
        """Kernels in Triton."""
        return self._fused_draws

    def peer_domain(self) -> str | None:
        """The running kernel of the machine, if all GPUs that this process sees reach each other."""
        devices = range(self.count())
        reach = all(torch.cuda.can_device_access_peer(a, b) for a in devices for b in devices if a != b)
        return _BOOT_ID.read_text().strip() if reach and _BOOT_ID.exists() else None

    @cached_property
    def _fused_rows(self) -> Any:
        if importlib.util.find_spec("triton") is None:
            return None
        return importlib.import_module("hp_platform.torch._triton_rows").TritonRows()

    def fused_rows(self) -> Any:
        """A kernel in Triton."""
        return self._fused_rows

    @cached_property
    def _fused_updates(self) -> Any:
        if importlib.util.find_spec("triton") is None:
            return None
        return importlib.import_module("hp_platform.torch._triton_updates").TritonUpdates()

    def fused_updates(self) -> Any:
        """Kernels in Triton."""
        return self._fused_updates

    @cached_property
    def _fused_scores(self) -> Any:
        if importlib.util.find_spec("triton") is None:
            return None
        return importlib.import_module("hp_platform.torch._triton_scores").TritonScores()

    def fused_scores(self) -> Any:
        """Kernels in Triton."""
        return self._fused_scores
