"""PyTorch on cpu, cuda and npu (torch_npu)."""

from hp_platform.torch._platform import TorchPlatform


def build_platform() -> TorchPlatform:
    """A new platform object; :func:`hp_platform.get_platform` keeps the one of the process."""
    return TorchPlatform()


__all__ = ["TorchPlatform", "build_platform"]
