"""Random numbers of PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from hp_platform.draws import Distribution, Region
from hp_platform.philox import LANES, block_range, words_of_blocks
from hp_platform.random_stream import default_random_stream
from hp_platform.torch._draws import draw_on_cpu, draw_on_device
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

    def draw(
        self, distribution: Distribution, seed: int, stream: int, region: Region, device: str = "cpu"
    ) -> torch.Tensor:
        """Values of a region: by numpy for cpu, by a fused kernel where the device has it, composed of its operations elsewhere."""
        kind = device.partition(":")[0]
        if kind == "meta":
            return torch.empty(region.size, dtype=getattr(torch, distribution.result), device="meta")
        if kind == "cpu":
            return draw_on_cpu(distribution, seed, stream, region)
        fused = self._devices[kind].fused_draws()
        if fused is not None:
            drawn: torch.Tensor | None = fused.draw(distribution, seed, stream, region, torch.device(device))
            if drawn is not None:
                return drawn
        if distribution.is_whole or self._devices[kind].rounds_like_ieee:
            return draw_on_device(distribution, seed, stream, region, device)
        return draw_on_cpu(distribution, seed, stream, region).to(device)

    def dropout(self, x: torch.Tensor, p: float, seed: int, stream: int, region: Region) -> torch.Tensor:
        """Scaled values and zeros."""
        fused = None if x.is_meta else self._devices[x.device.type].fused_draws()
        if fused is not None:
            result = fused.dropout(x, p, seed, stream, region)
            if result is not None:
                dropped: torch.Tensor = result[0]
                return dropped
        x = x.detach()
        scale = 1.0 / (1.0 - p) if p < 1 else 0.0
        mask = self.draw(Distribution.event(p), seed, stream, region, str(x.device))
        return torch.where(mask, torch.zeros((), dtype=x.dtype, device=x.device), x * scale)

    def dropout_keeping(
        self, x: torch.Tensor, p: float, seed: int, stream: int, region: Region
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same and its mask, which fused kernels write along."""
        fused = None if x.is_meta else self._devices[x.device.type].fused_draws()
        if fused is not None:
            result: tuple[torch.Tensor, torch.Tensor | None] | None = fused.dropout(
                x, p, seed, stream, region, with_mask=True
            )
            if result is not None:
                return result
        return self.dropout(x, p, seed, stream, region), None

    def dropout_again(
        self, x: torch.Tensor, mask: torch.Tensor | None, p: float, seed: int, stream: int, region: Region
    ) -> torch.Tensor:
        """By the mask, or drawn again."""
        if mask is None:
            return self.dropout(x, p, seed, stream, region)
        masked: torch.Tensor = self._devices[x.device.type].fused_draws().masked(x, mask, p, region)
        return masked

    def is_recomputing(self) -> bool:
        """Whether the library's stream draws again, or torch's checkpointing has put its hooks for recomputation in place."""
        if default_random_stream().is_replaying:
            return True
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return hooks is not None and hooks[0].__qualname__.startswith("_recomputation_hook.")

    def _generators(self, device: str) -> TorchDevice:
        return self._devices[device.partition(":")[0]]
