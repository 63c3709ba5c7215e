"""AdamW in thirty lines on the platform, until hp-optim brings the real one. It sees shards only, and needs no communication.

Source: Loshchilov and Hutter 2019 (arXiv 1711.05101), with bias correction as in Adam (arXiv 1412.6980).
"""

from __future__ import annotations

import math
from typing import Any

from hp_platform import get_platform


class AdamW:
    """State per parameter: ``mean`` and ``square``, moving averages of the gradient and of its square."""

    def __init__(
        self,
        parameters: dict[str, Any],
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        decay: float = 0.1,
    ) -> None:
        self._platform = get_platform()
        self.parameters, self.betas, self.eps, self.decay = parameters, betas, eps, decay
        self.step_count = 0
        self.mean = {
            name: self._platform.zeros_like(self._platform.detach(p)) for name, p in parameters.items()
        }
        self.square = {
            name: self._platform.zeros_like(self._platform.detach(p)) for name, p in parameters.items()
        }

    def step(self, lr: float) -> None:
        """Update every parameter that has a gradient, and clear it. Matrices decay, vectors (norm weights) do not."""
        platform, (b1, b2) = self._platform, self.betas
        self.step_count = self.step_count + 1
        rate = lr / (1 - b1**self.step_count)
        correction = 1 / math.sqrt(1 - b2**self.step_count)
        with platform.no_grad():
            for name, parameter in self.parameters.items():
                grad = platform.get_grad(parameter)
                if grad is None:
                    continue
                m = self.mean[name] = self.mean[name] * b1 + grad * (1 - b1)
                v = self.square[name] = self.square[name] * b2 + grad * grad * (1 - b2)
                decay = self.decay if parameter.ndim > 1 else 0.0
                new = parameter * (1 - lr * decay) - rate * m / (platform.sqrt(v) * correction + self.eps)
                platform.copy_(parameter, platform.detach(new))
                platform.set_grad(parameter, None)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first tenth, then half a cosine down to a tenth of the peak. ``step`` counts from 0."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
