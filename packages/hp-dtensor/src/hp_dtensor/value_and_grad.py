"""``parallelize_value_and_grad``: values and gradients of a function as values, without touching any ``grad``."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor.module_tensors import is_dtensor
from hp_platform import get_platform

Tensor = Any


def parallelize_value_and_grad(
    fn: Callable[..., Any], weights: Sequence[Tensor], sens: Sequence[float] | None = None
) -> Callable[..., tuple[Any, tuple[Tensor, ...]]]:
    """``f(*args, **kwargs) -> (outputs, grads)``: runs ``fn`` once, and gives its values and the gradients of ``weights``.

    Args:
        fn: returns a tensor, or a tuple or list whose first entry is one. DTensors and plain tensors alike.
        weights: the leaves to differentiate for: DTensors or plain tensors that require grad.
        sens: how much each output counts, for a ``fn`` with several: what is differentiated is the sum over ``i`` of
            ``sens[i] * sum(outputs[i])``. None: the first counts 1, the others 0.

    The gradients are those of the unsharded program; nobody scales by the number of ranks. Each lies as its weight, and is
    zeros for a weight that the outputs do not depend on. The outputs are handed out without their graph.

    Communication: that of ``fn`` and of its backward. All ranks call. TypeError if ``fn`` is not callable, ``weights`` no list
    of tensors, ``sens`` no list of numbers or of another length than the outputs, and if it is given for a single output;
    ValueError for a weight that does not require grad, or an output that shall count and does not depend on any.
    """
    if not callable(fn):
        raise TypeError(f"parallelize_value_and_grad takes a function, got {type(fn).__name__}")
    platform = get_platform()
    if platform.is_tensor(weights) or not isinstance(weights, Sequence):
        raise TypeError(f"weights takes a list of tensors, got {type(weights).__name__}")
    for i, weight in enumerate(weights):
        if not platform.is_tensor(weight):
            raise TypeError(f"weights[{i}] is no tensor, got {type(weight).__name__}")
        if not platform.requires_grad(weight):
            raise ValueError(
                f"weights[{i}] does not require grad: ask for it with requires_grad_(), or leave it out"
            )
    if sens is not None and (
        not isinstance(sens, (list, tuple))
        or any(isinstance(s, bool) or not isinstance(s, numbers.Real) for s in sens)
    ):
        raise TypeError(f"sens takes a list with one number per output, got {sens!r}")
    chosen = tuple(weights)

    @functools.wraps(fn)
    def value_and_grad(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Tensor, ...]]:
        with platform.enable_grad():
            outputs = fn(*args, **kwargs)
            counted = _counted(outputs, sens)
            grads = _gradients(counted, chosen)
        if isinstance(outputs, (list, tuple)):
            return tuple(_detached(x) for x in outputs), grads
        return _detached(outputs), grads

    return value_and_grad


def _counted(outputs: Any, sens: Sequence[float] | None) -> list[tuple[Tensor, float]]:
    """The outputs that count, each with how much."""
    if not isinstance(outputs, (list, tuple)):
        if sens is not None:
            raise TypeError(
                f"sens={list(sens)} is for a function with several outputs, and this one gave a single one"
            )
        outputs, sens = (outputs,), (1.0,)
    elif sens is None:
        sens = (1.0, *(0.0 for _ in outputs[1:]))
    if len(sens) != len(outputs):
        raise TypeError(
            f"sens has {len(sens)} numbers, the function {len(outputs)} outputs: give one per output"
        )
    platform = get_platform()
    found = []
    for i, (x, s) in enumerate(zip(outputs, sens, strict=True)):
        if s == 0:
            continue
        if not platform.is_tensor(x) or not platform.requires_grad(x):
            raise ValueError(
                f"output {i} shall count {s}, but does not depend on any weight that requires grad (it is a "
                f"{type(x).__name__})"
            )
        found.append((x, s))
    return found


def _gradients(counted: Sequence[tuple[Tensor, float]], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    platform: Any = get_platform()
    outputs, seeds = [], []
    for x, s in counted:
        # The gradient of a Shard is a Shard, that of a Replicate or a sum is Replicate: of a constant, the constant everywhere.
        local = x._without_averages()._local if is_dtensor(x) else x
        outputs.append(local)
        seeds.append(platform.full(tuple(local.shape), s, local.dtype, platform.device_of(local)))
    inputs = [w._local if is_dtensor(w) else w for w in weights]
    found = platform.grad(outputs, inputs, seeds, allow_unused=True) if outputs else [None] * len(inputs)
    grads = []
    for weight, local, gradient in zip(weights, inputs, found, strict=True):
        gradient = platform.zeros_like(local) if gradient is None else gradient
        grads.append(weight._wrap(gradient, weight._spec.grad) if is_dtensor(weight) else gradient)
    return tuple(grads)


def _detached(x: Any) -> Any:
    if is_dtensor(x):
        return x.detach()
    platform = get_platform()
    return platform.detach(x) if platform.is_tensor(x) else x
