"""Where the state of an optimizer lies: beside its parameters, or in the memory of the host.

[Note: state on the host] With ``offload_state`` the state of parameters that lie on a device lies in page-locked memory of the host. To
who reads or writes it, it is like any state: tensors of the same shapes, placements and names, whose local tensors are on
the cpu. Only a step knows more: it copies state to the device and back, beside the computation, and ends when all copies
have been asked for. They may be under way still; so ``optimizer.state``, which everybody else comes through, waits for them.
"""

from __future__ import annotations

from collections.abc import Callable

from hp_optim.offload.transfers import HOST, Transfers
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import DType, Tensor

OFFLOAD_STATE = "offload_state"
"""Key of a group."""


class StateMemory:
    """The host's memory of one optimizer, and the ways to it."""

    def __init__(self, platform: Platform, make: Callable[[Platform, str], Transfers | None]) -> None:
        """``make``: the transfers of a device; None for a device whose memory is the host's."""
        self._platform, self._make = platform, make
        self._found: dict[str, Transfers | None] = {}

    def transfers(self, device: str) -> Transfers | None:
        """Those of a device, made when they are first wanted."""
        if device not in self._found:
            self._found[device] = self._make(self._platform, device)
        return self._found[device]

    def land(self) -> None:
        """The host waits for what is on its way from the devices."""
        for found in self._found.values():
            if found is not None:
                found.land()


class StateHome:
    """Where the state of a group lies."""

    def __init__(self, platform: Platform, memory: StateMemory, *, offloads: bool) -> None:
        self._platform, self._memory = platform, memory
        self.offloads = offloads

    def transfers(self, device: str) -> Transfers | None:
        """The way between state and the parameters on ``device``; None if they are together."""
        return self._memory.transfers(device) if self.offloads else None

    def zeros(self, shape: tuple[int, ...], dtype: DType, device: str) -> Tensor:
        """New state of what is on ``device``."""
        transfers = self.transfers(device)
        if transfers is None:
            return self._platform.zeros(shape, dtype, device)
        return self._platform.fill_(transfers.empty_on_host(shape, dtype), 0.0)

    def settled(self, x: Tensor, device: str) -> Tensor:
        """State that came from elsewhere, where state of ``device`` lies: ``x`` itself, or a copy."""
        platform, transfers = self._platform, self.transfers(device)
        if transfers is None:
            if platform.device_of(x) == device:
                return x
            self.landed()
            return platform.to_device(x, device)
        is_there = platform.is_contiguous(x) and transfers.is_on_host(x)
        is_nothing = 0 in tuple(x.shape) and platform.device_of(x) == HOST
        return x if is_there or is_nothing else self.copied(x, device)

    def landed(self) -> None:
        """The host waits for what is on its way from the devices, because it reads or drops state. Steps that go on as before need not."""
        self._memory.land()

    def copied(self, x: Tensor, device: str) -> Tensor:
        """A copy where state of ``device`` lies. The host waits for ``x``."""
        platform, transfers = self._platform, self.transfers(device)
        self.landed()
        if transfers is not None:
            return platform.copy_(transfers.empty_on_host(tuple(x.shape), x.dtype), x)
        is_there = platform.device_of(x) == device
        return platform.clone(x) if is_there else platform.to_device(x, device)
