"""Arrays for :mod:`hp_platform.draws` on PyTorch: numpy's with torch's memory for cpu, torch's own on other devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hp_platform.draws import Distribution, Region, draw
from hp_platform.draws.host_arrays import HostArrays, draw_on_host


class _CpuArrays(HostArrays):
    """numpy's, but for the buffer: a storage that numpy has looked into could never be resized again."""

    def buffer(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Memory."""
        return torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")

    def write(self, buffer: Any, rows: slice, columns: slice, values: Any) -> None:
        """A part of it."""
        buffer[rows, columns].copy_(torch.from_numpy(values))


class DeviceArrays:
    """Implements :class:`hp_platform.draws.Arrays` by operations on one device."""

    blocks_at_once = 1 << 20  # some hundred megabytes of temporaries

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def grid(self, starts: Any, count: int) -> torch.Tensor:
        """Numbers that follow each start."""
        column = torch.from_numpy(starts).to(self._device)
        return column[:, None] + torch.arange(count, dtype=torch.int64, device=self._device)

    def interleaved(self, lanes: Sequence[torch.Tensor]) -> torch.Tensor:
        """Entries in turn."""
        return torch.stack(torch.broadcast_tensors(*lanes), dim=-1).flatten(1)

    def shifted(self, x: torch.Tensor, shifts: Any, width: int) -> torch.Tensor:
        """Parts of rows."""
        if (shifts == shifts[0]).all():
            return x[:, int(shifts[0]) : int(shifts[0]) + width]
        return torch.gather(x, 1, self.grid(shifts, width))

    def double(self, x: torch.Tensor) -> torch.Tensor:
        """float64."""
        return x.double()

    def bits(self, x: torch.Tensor) -> torch.Tensor:
        """int64 view."""
        return x.view(torch.int64)

    def from_bits(self, x: torch.Tensor) -> torch.Tensor:
        """float64 view."""
        return x.view(torch.float64)

    def where(self, condition: torch.Tensor, x: Any, y: Any) -> torch.Tensor:
        """Choice."""
        return torch.where(condition, x, y)

    def sqrt(self, x: torch.Tensor) -> torch.Tensor:
        """Square root."""
        return x.sqrt()

    def rounded(self, x: torch.Tensor, dtype: str) -> torch.Tensor:
        """Another dtype."""
        return x.to(getattr(torch, dtype))

    def buffer(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Memory."""
        return torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)

    def write(self, buffer: torch.Tensor, rows: slice, columns: slice, values: torch.Tensor) -> None:
        """A part of it."""
        buffer[rows, columns].copy_(values)


def draw_on_cpu(distribution: Distribution, seed: int, stream: int, region: Region) -> torch.Tensor:
    """Values on the host."""
    drawn: torch.Tensor = draw_on_host(distribution, seed, stream, region, _CpuArrays())
    return drawn


def draw_on_device(
    distribution: Distribution, seed: int, stream: int, region: Region, device: str
) -> torch.Tensor:
    """The same values, composed of the device's operations."""
    with torch.no_grad():
        drawn: torch.Tensor = draw(DeviceArrays(torch.device(device)), distribution, seed, stream, region)
    return drawn
