"""NVIDIA (and ROCm) devices. The only file that names torch.cuda."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hp_platform.protocols.device import Repeated
from hp_platform.repeated import MOST_KEPT, RepeatedWork
from hp_platform.torch.device._accelerator import AcceleratorDevice
from hp_platform.torch.device._base import CommFacts
from hp_platform.torch.device._copy_batches import CopyBatches, find_copy_batch
from hp_platform.torch.device._cuda_graphs import GraphRecorder, HeldGraphs

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


class _Using:
    """``torch.cuda.stream`` for a stream of the current device, by the two calls that it ends in: runtimes change streams many times
    a step, and the host's time counts.
    """

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *_: Any) -> None:
        torch._C._cuda_setStream(*self._before)


def _stream_for_batches(device: int) -> int:
    """The address of the current stream; 0 for the default one, and while a graph is captured: neither takes batches of copies."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return 0 if stream and torch._C._cuda_isCurrentStreamCapturing() else stream


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class CudaDevice(AcceleratorDevice):
    """Handle of ``"cuda"``."""

    name = "cuda"
    comm_backend = "nccl"
    world_backend = "cpu:gloo,cuda:nccl"
    rounds_like_ieee = True
    comm = CommFacts(
        reduce_ops=frozenset({"sum", "mean", "max", "min", "prod"}),
        reducible=_NCCL_DTYPES | {torch.int16},
        movable=_NCCL_DTYPES,
        widened={torch.int16: torch.int32},
        coalesces=True,
        uneven_lists=True,
        exchanges_lists=True,
    )

    @cached_property
    def missing(self) -> frozenset[str]:
        """What depends on kernels in Triton, where it is not installed."""
        return frozenset() if _has_triton() else frozenset({"numbers_on_device"})

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

    @cached_property
    def _streams(self) -> dict[tuple[int, ...], Any]:
        # Of what was the current stream: an object says which one it is, and holds nothing.
        torch.cuda.init()
        return {}

    def current_stream(self) -> Any:
        """The current stream; the same object for the same stream."""
        streams = self._streams
        key = torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())
        found = streams.get(key)
        if found is None:
            found = streams[key] = torch.cuda.current_stream()
        return found

    def use_stream(self, stream: Any) -> AbstractContextManager[None]:
        """Make a stream the current one."""
        is_here = stream.device_index == torch._C._cuda_getDevice()
        return _Using(stream) if is_here else torch.cuda.stream(stream)

    def _event_type(self) -> type:
        return _Event

    def repeated(self, most_kept: int = MOST_KEPT, *, makes_products: bool = True) -> Repeated:
        """Recorded in graphs."""
        return RepeatedWork(self._recorders[makes_products], most_kept=most_kept)

    @cached_property
    def _recorders(self) -> dict[bool, GraphRecorder]:
        held = HeldGraphs()
        return {flag: GraphRecorder(self, torch.cuda, held, makes_products=flag) for flag in (False, True)}

    @cached_property
    def _fused_draws(self) -> Any:
        # Triton comes with torch's CUDA builds; without it draws are composed.
        if not _has_triton():
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
    def _copy_batches(self) -> CopyBatches | None:
        found = find_copy_batch()
        return None if found is None else CopyBatches(found, _stream_for_batches)

    def copy_batches(self) -> CopyBatches | None:
        """By one call of the driver, where it has got it."""
        return self._copy_batches

    @cached_property
    def _fused_rows(self) -> Any:
        if not _has_triton():
            return None
        return importlib.import_module("hp_platform.torch._triton_rows").TritonRows()

    def fused_rows(self) -> Any:
        """Kernels in Triton."""
        return self._fused_rows

    @cached_property
    def _fused_updates(self) -> Any:
        if not _has_triton():
            return None
        return importlib.import_module("hp_platform.torch._triton_updates").TritonUpdates()

    def fused_updates(self) -> Any:
        """Kernels in Triton."""
        return self._fused_updates

    @cached_property
    def _fused_scores(self) -> Any:
        if not _has_triton():
            return None
        return importlib.import_module("hp_platform.torch._triton_scores").TritonScores()

    def fused_scores(self) -> Any:
        """Kernels in Triton."""
        return self._fused_scores
