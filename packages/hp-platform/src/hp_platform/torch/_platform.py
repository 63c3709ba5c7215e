"""The platform object of PyTorch: the primitives mixed together, and the table of devices."""

from __future__ import annotations

from functools import cached_property

import torch

from hp_platform.capabilities import check_known
from hp_platform.collectives import _launch
from hp_platform.platform import PlatformType
from hp_platform.torch._autograd import TorchAutogradOps
from hp_platform.torch._coalesced import TorchCoalescedOps
from hp_platform.torch._comm import TorchCommOps
from hp_platform.torch._nn import TorchNNOps
from hp_platform.torch._random import TorchRandomOps
from hp_platform.torch._rows import TorchRowOps
from hp_platform.torch._scores import TorchScoreOps
from hp_platform.torch._storage import TorchStorageOps
from hp_platform.torch._tensor import TorchTensorOps
from hp_platform.torch._traced import TorchTracedOps
from hp_platform.torch._updates import TorchUpdateOps
from hp_platform.torch._world import TorchWorldOps
from hp_platform.torch.device import TorchDevice, all_devices


class TorchPlatform(
    TorchTensorOps,
    TorchRowOps,
    TorchStorageOps,
    TorchNNOps,
    TorchScoreOps,
    TorchAutogradOps,
    TorchRandomOps,
    TorchWorldOps,
    TorchCommOps,
    TorchCoalescedOps,
    TorchTracedOps,
    TorchUpdateOps,
):
    """Primitives of PyTorch; see :mod:`hp_platform.protocols` for what each promises."""

    platform_type = PlatformType.PYTORCH
    framework_version: str = torch.__version__

    def __init__(self) -> None:
        super().__init__(all_devices())
        self._found: dict[str, TorchDevice] = {}
        """Handles that were asked for, by the name that was given: runtimes ask at every step, and drivers answer slowly."""
        # dynamo would record the launch without what it waits for. Compiled code has collectives of its own.
        self.run_uncompiled([_launch.launch])

    @cached_property
    def _available(self) -> tuple[str, ...]:
        # Asked once: looking for torch_npu may import it, and devices do not come and go.
        return tuple(name for name, handle in self._devices.items() if handle.is_available())

    def device(self, name: str | None = None) -> TorchDevice:
        """The handle of a device; see :class:`hp_platform.platform.Platform`."""
        if name is None:
            return self._devices[self._available[0]]
        found = self._found.get(name)
        if found is not None:
            return found
        kind = name.partition(":")[0]
        if kind not in self._devices:
            raise ValueError(f"unknown device {name!r}; PyTorch's are {', '.join(self._devices)}")
        handle = self._devices[kind]
        if not handle.is_available():
            raise RuntimeError(
                f"device {name!r} is not available here ({handle.why_not()}); available: {', '.join(self._available)}"
            )
        self._found[name] = handle
        return handle

    def device_types(self) -> tuple[str, ...]:
        """Usable kinds of device, best first."""
        return self._available

    def supports(self, capability: str, device: str | None = None) -> bool:
        """Whether the capability exists for tensors of ``device`` (default: the best one available)."""
        check_known(capability)
        return capability not in self.device(device).missing
