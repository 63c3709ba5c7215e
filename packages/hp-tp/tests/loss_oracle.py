"""Cross-entropy as it is defined, in numpy: the oracle of the losses, with its gradient by the definition of log_softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_platform import get_platform

IGNORED = -100


@dataclass(frozen=True)
class Loss:
    """One call."""

    scores: Any
    """``(n, c, ...)`` or ``(c,)``."""
    target: Any
    weight: Any = None
    reduction: str = "mean"
    label_smoothing: float = 0.0
    ignore_index: int = IGNORED

    def value_and_gradient(self, seed: Any = None) -> tuple[Any, Any]:
        """The loss, and its gradient; ``seed`` is the incoming one of reduction none."""
        x = np.asarray(self.scores, np.float64)
        rows = x[None] if x.ndim == 1 else np.moveaxis(x, 1, -1)
        shape = rows.shape[:-1]
        rows, target = rows.reshape(-1, rows.shape[-1]), np.asarray(self.target).reshape(-1)
        num_rows, num_classes = rows.shape
        weight = np.ones(num_classes) if self.weight is None else np.asarray(self.weight)
        kept = target != self.ignore_index
        safe = np.where(kept, target, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            shifted = rows - rows.max(1, keepdims=True) if num_rows else rows
            logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
            # The share of each class in each row's loss: loss = -(share * logs).sum()
            share = np.zeros_like(rows)
            share[np.arange(num_rows), safe] = (1 - self.label_smoothing) * weight[safe]
            share = (share + self.label_smoothing / num_classes * weight) * kept[:, None]
            losses = -np.where((share == 0) & ~np.isnan(logs), 0.0, share * logs).sum(1)
            counts = (weight[safe] * kept).sum()
            if self.reduction == "none":
                upstream = np.asarray(seed).reshape(-1)
                value = losses.reshape(np.shape(self.target))
            else:
                value = losses.sum() / (counts if self.reduction == "mean" else 1)
                upstream = np.full(num_rows, 1 / counts if self.reduction == "mean" else 1.0)
        upstream = np.where(kept, upstream, 0.0)
        # Each logarithm depends on all scores of its row: d logs_k / d x_c = [k = c] - p_c
        gradient = upstream[:, None] * (np.exp(logs) * share.sum(1, keepdims=True) - share)
        gradient = gradient.reshape(*shape, num_classes)
        return value, gradient[0] if x.ndim == 1 else np.moveaxis(gradient, -1, 1)


def numbers(*shape: int, seed: int = 0) -> Any:
    """Scores between -3 and 3, the same at every call."""
    return np.random.default_rng(seed).uniform(-3, 3, shape)


def targets(num_classes: int, *shape: int, ignored: str = "some", seed: int = 1) -> Any:
    """Class numbers; some, all or none of them ignored."""
    found = np.random.default_rng(seed).integers(0, num_classes, shape)
    if ignored == "some" and found.size > 1:
        found.reshape(-1)[1::3] = IGNORED
    return np.full_like(found, IGNORED) if ignored == "all" else found


def check_near(actual: Any, expected: Any, *, name: str, atol: float) -> None:
    """AssertionError unless shapes and values agree; NaN equals NaN: the mean of no target is one."""
    platform = get_platform()
    found = platform.to_numpy(platform.detach(actual)).astype(np.float64)
    assert found.shape == np.shape(expected), f"{name}: shape {found.shape}, expected {np.shape(expected)}"
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol, equal_nan=True, err_msg=name)
