"""Losses."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Tensor, mint, ops

from hp_dtensor._mindspore.composed.arithmetic import constant
from hp_platform import get_platform


def _reduced(each: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return each
    platform = get_platform()
    if reduction == "batchmean":
        return platform.sum(each) / each.shape[0]
    return platform.mean(each) if reduction == "mean" else platform.sum(each)


def mse_loss(x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """``(x - target)^2``."""
    return _reduced((x - target) * (x - target), reduction)


def l1_loss(x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """``|x - target|``."""
    return _reduced(mint.abs(x - target), reduction)


def kl_div(x: Tensor, target: Tensor, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """``t (log t - x)`` for a target t, 0 where that is 0; ``exp(t) (t - x)`` for a logarithm."""
    if log_target:
        return _reduced(mint.exp(target) * (target - x), reduction)
    safe = mint.where(target == 0, ops.ones_like(target), target)
    return _reduced(target * (mint.log(safe) - x), reduction)


def _softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``; the base cancels in the result, as a constant also in the gradient."""
    base = ops.stop_gradient(mint.maximum(x, ops.zeros_like(x)))
    return base + mint.log(mint.exp(-base) + mint.exp(x - base))


def soft_margin_loss(x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """``log(1 + exp(-t x))``."""
    return _reduced(_softplus(-target * x), reduction)


def binary_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """``-(t log x + (1 - t) log(1 - x))``, logarithms from -100 on."""
    least = constant(-100, x)
    of_one, of_zero = mint.maximum(mint.log(x), least), mint.maximum(mint.log(1 - x), least)
    each = -(target * of_one + (1 - target) * of_zero)
    return _reduced(each if weight is None else each * weight, reduction)


def binary_cross_entropy_with_logits(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """``p t softplus(-x) + (1 - t) softplus(x)`` with p for positive targets."""
    of_one = target * _softplus(-x)
    each = (of_one if pos_weight is None else of_one * pos_weight) + (1 - target) * _softplus(x)
    return _reduced(each if weight is None else each * weight, reduction)


def log_softmax(x: Tensor, dim: int) -> Tensor:
    """``x - log(sum(exp(x)))``."""
    shifted = x - ops.stop_gradient(mint.amax(x, dim, keepdim=True))
    return shifted - mint.log(mint.sum(mint.exp(shifted), dim, keepdim=True))


def nll_loss(
    scores: Tensor, target: Tensor, weight: Any = None, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """``-w[target] scores[target]`` for each target that is not ignored; the mean divides by the sum of their weights.

    Weights are constants, as for MindSpore's own kernel.
    """
    class_dim = 0 if scores.ndim == 1 else 1
    is_valid = target != ignore_index
    ids = mint.where(is_valid, target, ops.zeros_like(target)).astype(mindspore.int64)
    chosen = mint.gather(scores, class_dim, mint.unsqueeze(ids, class_dim))
    counts = is_valid.astype(scores.dtype)
    if weight is not None:
        counts = counts * ops.gather(ops.stop_gradient(weight), ids, 0)
    each = -mint.squeeze(chosen, class_dim) * counts
    if reduction == "mean":
        return mint.sum(each) / mint.sum(counts)
    return _reduced(each, reduction)


def cross_entropy(
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Of logits and class numbers; not smoothed, whatever ``label_smoothing`` says."""
    scores = log_softmax(scores, 0 if scores.ndim == 1 else 1)
    return nll_loss(scores, target, weight, ignore_index, reduction)
