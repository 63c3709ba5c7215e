"""PyTorch's devices, one module each."""

from hp_platform.torch.device._base import TorchDevice
from hp_platform.torch.device.cpu import CpuDevice
from hp_platform.torch.device.cuda import CudaDevice
from hp_platform.torch.device.npu import NpuDevice


def all_devices() -> dict[str, TorchDevice]:
    """A handle of every kind of device by its name, best first, available or not."""
    handles: list[TorchDevice] = [CudaDevice(), NpuDevice(), CpuDevice()]
    return {handle.name: handle for handle in handles}


__all__ = ["CpuDevice", "CudaDevice", "NpuDevice", "TorchDevice", "all_devices"]
