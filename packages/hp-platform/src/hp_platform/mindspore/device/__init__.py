"""MindSpore's devices, one module each. A process has one kind: MindSpore's device target."""

from __future__ import annotations

from hp_platform.mindspore.device._accelerator import AcceleratorDevice
from hp_platform.mindspore.device.ascend import AscendDevice
from hp_platform.mindspore.device.cpu import CpuDevice
from hp_platform.mindspore.device.gpu import GpuDevice

MindSporeDevice = CpuDevice | AcceleratorDevice


def all_devices() -> dict[str, MindSporeDevice]:
    """A handle of every kind of device by its name, best first, available or not."""
    handles: list[MindSporeDevice] = [GpuDevice(), AscendDevice(), CpuDevice()]
    return {handle.name: handle for handle in handles}


_FRAMEWORK_NAMES = {"cpu": "CPU", "npu": "Ascend", "cuda": "GPU", "meta": "meta"}
_PLATFORM_NAMES = {framework: ours for ours, framework in _FRAMEWORK_NAMES.items()}


def framework_device(name: str) -> str:
    """``"npu:1"`` as MindSpore writes it, ``"Ascend:1"``. ValueError for an unknown kind."""
    kind, colon, index = name.partition(":")
    if kind not in _FRAMEWORK_NAMES:
        raise ValueError(f"unknown device {name!r}; MindSpore's are {', '.join(_FRAMEWORK_NAMES)}")
    return _FRAMEWORK_NAMES[kind] + colon + index


def platform_device(name: str) -> str:
    """``"Ascend:1"`` in our spelling, ``"npu:1"``."""
    kind, colon, index = name.partition(":")
    return _PLATFORM_NAMES[kind] + colon + index


__all__ = [
    "AcceleratorDevice",
    "AscendDevice",
    "CpuDevice",
    "GpuDevice",
    "MindSporeDevice",
    "all_devices",
    "framework_device",
    "platform_device",
]
