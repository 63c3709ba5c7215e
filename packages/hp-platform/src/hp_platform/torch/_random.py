"""Random numbers of PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from hp_platform.philox import LANES, block_range, words_of_blocks
from hp_platform.torch.device import TorchDevice
from hp_platform.uniform import uniform


class TorchRandomOps:
    """Implements :class:`hp_platform.protocols.RandomOps`."""

    _devices: dict[str, TorchDevice]

    def manual_seed(self, seed: int) -> None:
        """Seed all generators."""
        torch.manual_seed(seed)

    def get_rng_state(self, device: str = "cpu") -> Any:
        """State of a device's generator."""
        return self._generators(device).get_rng_state(device)

    def set_rng_state(self, state: Any, device: str = "cpu") -> None:
        """Put a state back."""
        self._generators(device).set_rng_state(state, device)

    def random_bits(
        self, seed: int, stream: int, start: int, count: int, device: str = "cpu"
    ) -> torch.Tensor:
        """Words of the Philox sequence, computed on the device."""
        first, last = block_range(start, count)
        lanes = words_of_blocks(torch.arange(first, last, dtype=torch.int64, device=device), seed, stream)
        return torch.stack(lanes, dim=1).reshape(-1)[start - first * LANES :][:count].contiguous()

    uniform = uniform

    def _generators(self, device: str) -> TorchDevice:
        return self._devices[device.partition(":")[0]]
