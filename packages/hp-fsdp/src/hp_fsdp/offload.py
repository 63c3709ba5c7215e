"""Shards that wait in the host's memory: where they lie there, and how their gradients come back.

[Note: offloaded shards] Under :class:`~hp_fsdp.policy.CPUOffloadPolicy` a unit's rows lie on the host, page-locked. A gather begins
with one copy of the row to the device, a reduction ends with one copy of the reduced line to the host, each on the side stream of
its collective and so beside the computation. Gradients, which only the host needs, are given to the shards when the
reductions of a backward are over: the host waits for the copies there, once.

[Note: when the host may write] A copy to the device reads the row after the host has asked for it. So at the end of a forward
and of a backward the host waits until the last row that was asked for has been read: what an optimizer or a user writes
then is not seen by a forward of before. By then the device has nearly all of that forward behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

from hp_fsdp.parameter import ManagedParameter
from hp_fsdp.places import Places
from hp_platform.platform import Platform
from hp_platform.protocols.device import Event
from hp_platform.protocols.tensor import DType, Tensor

HOST = "cpu"


class HostMemory:
    """The host's memory as the device of ``places`` copies from and to it."""

    def __init__(self, platform: Platform, places: Places, *, pin: bool) -> None:
        """``pin``: page-locked, so that neither side waits for a copy."""
        self.platform = platform
        self.device = platform.device(places.device)
        self.pin = pin

    def empty(self, numel: int, dtype: DType) -> Tensor:
        """1-D, uninitialised."""
        if self.pin:
            return self.device.empty_pinned((numel,), dtype)
        return self.platform.empty((numel,), dtype, HOST)

    def land(self, row: Tensor) -> Landing:
        """Copy a 1-D tensor of the device to the host, behind what the current stream has been given."""
        landed = self.empty(row.shape[0], row.dtype)
        self.platform.copy_(landed, row, non_blocking=True)
        return Landing(landed, self.device.current_stream().record_event())


class Landing:
    """A line on its way to the host."""

    __slots__ = ("_event", "_row")

    def __init__(self, row: Tensor, event: Event) -> None:
        self._row = row
        self._event = event

    def wait(self) -> Tensor:
        """The line, when it is there: the host waits."""
        self._event.synchronize()
        return self._row


def check_on_host(platform: Platform, params: Sequence[ManagedParameter]) -> None:
    """RuntimeError with the names of offloaded parameters whose shards somebody has moved off the host."""
    moved = {}
    for param in params:
        device = platform.device_of(param.shard)
        if device.partition(":")[0] not in (HOST, "meta"):
            moved[param.name] = device
    if moved:
        names = ", ".join(repr(name) for name in moved)
        raise RuntimeError(
            f"shards of parameters were moved to {next(iter(moved.values()))} although offload_policy keeps them on the cpu: "
            f"{names}; leave out model.to(device) after fully_shard (on the meta device call model.to_empty(device='cpu')), "
            "or leave out the policy"
        )
