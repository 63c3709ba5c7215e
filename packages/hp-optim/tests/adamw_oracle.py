"""AdamW in numpy, one parameter at a time: every operation rounded to the dtype, every number rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np


class NumpyAdamW:
    """One parameter."""

    def __init__(
        self,
        value: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        maximize: bool = False,
    ) -> None:
        self.p = np.array(value)
        self.m, self.v, self.top = (np.zeros_like(self.p) for _ in range(3))
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.amsgrad, self.sign = amsgrad, -1 if maximize else 1
        self.count = 0

    def step(self, gradient: Any) -> None:
        """None: nothing happens."""
        if gradient is None:
            return
        self.count += 1
        number, (beta1, beta2) = self.p.dtype.type, self.betas
        g = number(self.sign) * np.asarray(gradient, self.p.dtype)
        if self.weight_decay:
            self.p = self.p * number(1 - self.lr * self.weight_decay)
        self.m = self.m + (g - self.m) * number(1 - beta1)
        self.v = self.v * number(beta2) + g * g * number(1 - beta2)
        self.top = np.maximum(self.top, self.v)
        root = np.sqrt(self.top if self.amsgrad else self.v)
        denominator = root / number((1 - beta2**self.count) ** 0.5) + number(self.eps)
        self.p = self.p + self.m * number(-(self.lr / (1 - beta1**self.count))) / denominator
