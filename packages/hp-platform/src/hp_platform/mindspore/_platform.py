"""The platform object of MindSpore: the primitives mixed together, and the table of devices."""

from __future__ import annotations

import mindspore

from hp_platform.capabilities import check_known
from hp_platform.mindspore._autograd import MindSporeAutogradOps
from hp_platform.mindspore._comm import MindSporeCommOps
from hp_platform.mindspore._functional import MindSporeFunctionalOps
from hp_platform.mindspore._grads import MindSporeGradOps
from hp_platform.mindspore._native_comm import NativeCommOps
from hp_platform.mindspore._nn import MindSporeNNOps
from hp_platform.mindspore._random import MindSporeRandomOps
from hp_platform.mindspore._recording import ensure_recording
from hp_platform.mindspore._rows import MindSporeRowOps
from hp_platform.mindspore._scores import MindSporeScoreOps
from hp_platform.mindspore._traced import MindSporeTracedOps
from hp_platform.mindspore._updates import MindSporeUpdateOps
from hp_platform.mindspore._world import MindSporeWorldOps
from hp_platform.mindspore.device import MindSporeDevice, all_devices
from hp_platform.platform import PlatformType


class MindSporePlatform(
    MindSporeRowOps,
    MindSporeNNOps,
    MindSporeFunctionalOps,
    MindSporeScoreOps,
    MindSporeAutogradOps,
    MindSporeGradOps,
    MindSporeRandomOps,
    MindSporeCommOps,
    MindSporeWorldOps,
    MindSporeTracedOps,
    MindSporeUpdateOps,
):
    """Primitives of MindSpore; see :mod:`hp_platform.protocols` for what each promises."""

    platform_type = PlatformType.MINDSPORE
    framework_version: str = mindspore.__version__

    def __init__(self) -> None:
        super().__init__()
        self._devices = all_devices()
        ensure_recording()

    def device(self, name: str | None = None) -> MindSporeDevice:
        """The handle of a device; see :class:`hp_platform.platform.Platform`."""
        if name is None:
            return self._devices[self.device_types()[0]]
        kind = name.partition(":")[0]
        if kind not in self._devices:
            raise ValueError(f"unknown device {name!r}; MindSpore's are {', '.join(self._devices)}")
        handle = self._devices[kind]
        if not handle.is_available():
            available = ", ".join(self.device_types())
            raise RuntimeError(
                f"device {name!r} is not available here ({handle.why_not()}); available: {available}"
            )
        return handle

    def device_types(self) -> tuple[str, ...]:
        """Usable kinds of device, best first."""
        return tuple(name for name, handle in self._devices.items() if handle.is_available())

    def supports(self, capability: str, device: str | None = None) -> bool:
        """Whether the capability exists for tensors of ``device`` (default: the best one available)."""
        check_known(capability)
        return capability not in self.device(device).missing


class AcceleratorPlatform(NativeCommOps, MindSporePlatform):
    """The same with the communication kernels of Ascend and GPU. Not run on hardware."""
