"""What a cross-entropy is told: checked once, the same for all its forms."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, replace
from typing import Any

from hp_platform import get_platform

REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True)
class LossOptions:
    """Of one call."""

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    is_weight_cut: bool = False
    """Whether a rank has the weights of its own classes only."""

    def with_weight(self, is_cut: bool) -> LossOptions:
        """The same for weights that are cut, or not."""
        return replace(self, is_weight_cut=is_cut)


def checked_options(what: str, reduction: Any, ignore_index: Any, label_smoothing: Any) -> LossOptions:
    """ValueError for what no cross-entropy takes."""
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"{what}: reduction must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}"
        )
    if not isinstance(ignore_index, numbers.Integral) or isinstance(ignore_index, bool):
        raise ValueError(f"{what}: ignore_index is a class number, got {ignore_index!r}")
    if not (isinstance(label_smoothing, (int, float)) and 0 <= label_smoothing <= 1):
        raise ValueError(f"{what}: label_smoothing is a number from 0 to 1, got {label_smoothing!r}")
    return LossOptions(reduction, int(ignore_index), float(label_smoothing))


def check_target(what: str, target: Any, shape: tuple[int, ...], of: str) -> None:
    """ValueError unless ``target`` has a class number for each loss of ``shape``."""
    platform = get_platform()
    if not platform.is_tensor(target):
        raise ValueError(
            f"{what}: target is a tensor of class numbers, one per loss, got {type(target).__name__}"
        )
    if platform.is_floating(target.dtype):
        raise ValueError(
            f"{what} takes class numbers, got a target of {platform.dtype_name(target.dtype)}: probabilities are not built for "
            f"classes that are cut; gather the logits for them"
        )
    if tuple(target.shape) != shape:
        raise ValueError(f"{what}: {of} takes a target of shape {shape}, got {tuple(target.shape)}")


def check_weight(what: str, weight: Any, num_classes: int) -> None:
    """ValueError unless ``weight`` is None or has one number for each class, and asks for no gradient."""
    platform = get_platform()
    if weight is None:
        return
    if not platform.is_tensor(weight) or tuple(weight.shape) != (num_classes,):
        given = f"shape {tuple(weight.shape)}" if platform.is_tensor(weight) else type(weight).__name__
        raise ValueError(
            f"{what}: weight is a tensor with one number for each of {num_classes} classes, got {given}"
        )
    check_no_gradient(what, weight)


def check_no_gradient(what: str, weight: Any) -> None:
    """ValueError if the weights of classes ask for a gradient."""
    platform = get_platform()
    if weight is not None and platform.requires_grad(weight) and platform.is_grad_enabled():
        raise ValueError(
            f"{what} is not differentiable with respect to its weight, but that requires a gradient: give weight.detach()"
        )
