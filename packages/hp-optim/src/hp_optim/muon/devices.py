"""What an optimizer keeps of every device from step to step: a stream, work that comes again, and numbers of updates.

[Note: the host's time] A decoder of a billion parameters has a hundred matrices: a step starts some hundred products, copies and
updates, which take the host longer than the device. All but exchanges and norms comes again in every step on the same
memory, a batch or a stack at a time, so each is one launch where the device keeps what it has been given
(:class:`hp_platform.protocols.device.Repeated`). What changes from step to step must not be in such a launch: the learning
rate goes ahead to the device, where updates read it.
"""

from __future__ import annotations

from collections.abc import Hashable

from hp_platform.platform import Platform
from hp_platform.protocols.device import Repeated, Stream
from hp_platform.protocols.tensor import Tensor


class Devices:
    """For the life of an optimizer's plans: memory belongs to streams, and launches to memory."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._streams: dict[str, Stream] = {}
        self._repeated: dict[str, Repeated] = {}
        self._numbers: dict[Hashable, _Numbers] = {}

    def stream(self, device: str) -> Stream:
        """Of the iterations."""
        if device not in self._streams:
            self._streams[device] = self._platform.device(device).new_stream(high_priority=True)
        return self._streams[device]

    def repeated(self, device: str) -> Repeated:
        """Work of the steps on this device."""
        if device not in self._repeated:
            self._repeated[device] = self._platform.device(device).repeated()
        return self._repeated[device]

    def numbers(self, device: str, name: Hashable, keep: float, factor: float) -> Tensor:
        """``(2,)`` of float32 on the device, the same tensor for the same name, with these values for what the current stream does next."""
        key = (device, name)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = _Numbers(self._platform, device)
        found.set((keep, factor))
        return found.tensor


class _Numbers:
    """Two numbers on a device, written when they change."""

    def __init__(self, platform: Platform, device: str) -> None:
        self._platform = platform
        self.tensor = platform.zeros((2,), "float32", device)
        self._each = [platform.narrow(self.tensor, 0, at, 1) for at in range(2)]
        self._values = (0.0, 0.0)

    def set(self, values: tuple[float, float]) -> None:
        for each, value, before in zip(self._each, values, self._values, strict=True):
            if value != before:
                self._platform.fill_(each, value)
        self._values = values
