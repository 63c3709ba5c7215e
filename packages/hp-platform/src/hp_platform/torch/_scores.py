"""Which kernels make losses of scores."""

from __future__ import annotations

from typing import Any

import torch

from hp_platform.torch.device import TorchDevice


class TorchScoreOps:
    """Implements :class:`hp_platform.protocols.ScoreOps`."""

    _devices: dict[str, TorchDevice]

    def score_kernels(self, x: torch.Tensor) -> Any:
        """Triton's. A compiler makes kernels of its own."""
        if x.is_meta or torch.compiler.is_compiling():
            return None
        kernels = self._devices[x.device.type].fused_scores()
        return None if kernels is None or x.dtype not in kernels.dtypes else kernels
