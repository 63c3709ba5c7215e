"""Ascend devices through torch_npu. The only file that names torch_npu and torch.npu.

Written against torch_npu 2.13.0. Its functions have the names of torch's CUDA module where this backend needs them.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cached_property
from typing import Any

import torch

from hp_platform.torch.device._accelerator import AcceleratorDevice
from hp_platform.torch.device._base import CommFacts

# int64 is in HCCL's documents for the Atlas A2 series, not in the header of torch_npu 2.13.0; not run on hardware.
_HCCL_DTYPES = frozenset(
    {
        torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    }
)  # fmt: skip


class NpuDevice(AcceleratorDevice):
    """Handle of ``"npu"``."""

    name = "npu"
    comm_backend = "hccl"
    world_backend = "cpu:gloo,npu:hccl"
    rounds_like_ieee = False
    # The cube units of Ascend multiply no float64, and HCCL refuses to reduce it.
    missing = frozenset(
        {
            "float64_compute",
            "reduce_float64",
            "peer_memory",
            "fused_adamw",
            "recorded_work",
            "numbers_on_device",
        }
    )
    comm = CommFacts(
        # HCCL itself has no mean; torch_npu's is a division behind the sum, and not in every form of the collectives.
        reduce_ops=frozenset({"sum", "max", "min", "prod"}),
        reducible=_HCCL_DTYPES,
        movable=_HCCL_DTYPES | {torch.float64},
        # torch_npu lets HCCL all_reduce uint8, but not reduce_scatter it.
        widened={torch.uint8: torch.int32},
        coalesces=True,
        uneven_lists=False,
        # torch_npu makes it of an all_gather, with a warning.
        gathers=False,
    )

    @cached_property
    def _import_error(self) -> str | None:
        """None once torch_npu is imported, else why it cannot be."""
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed"
        try:
            importlib.import_module("torch_npu")
        except (ImportError, RuntimeError) as error:
            # ImportError: CANN's libraries are missing. RuntimeError: torch_npu refuses to stand beside a CUDA build of torch.
            return f"torch_npu does not load: {error}"
        return None

    def is_available(self) -> bool:
        """Whether torch_npu loads and sees a device. The first call imports it, if it is installed."""
        return self._import_error is None and torch.npu.is_available()

    def why_not(self) -> str:
        """Which part is missing."""
        return self._import_error or "torch_npu sees no device"

    def _api(self) -> Any:
        return torch.npu

    def _event_type(self) -> type:
        return self._event

    @cached_property
    def _event(self) -> type:
        class Event(torch.npu.Event):  # here, because its base exists only after the import
            def elapsed_ms(self, end: Any) -> float:
                """Milliseconds to ``end``."""
                return self.elapsed_time(end)

        return Event
