"""One call of an operation on whole tensors, with its gradients: what the rule checker holds every rank's work to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from hp_dtensor.no_elements import has_gradients, is_complex
from hp_platform import get_platform

Tensor = Any


def tensors_of(args: Sequence[Any]) -> Iterator[Tensor]:
    """Every tensor among arguments, also in lists."""
    for arg in args:
        if isinstance(arg, (list, tuple)):
            yield from tensors_of(arg)
        elif get_platform().is_tensor(arg):
            yield arg


def with_tensors(args: Sequence[Any], tensors: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with other values in the places of the tensors; lists as tuples."""
    left, is_tensor = iter(tensors), get_platform().is_tensor

    def replaced(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return tuple(map(replaced, x))
        return next(left) if is_tensor(x) else x

    return tuple(map(replaced, args))


def results_of(found: Any) -> list[Any]:
    """What a call gave, as a list."""
    return list(found) if isinstance(found, (list, tuple)) else [found]


def leaf(x: Tensor) -> Tensor:
    """A copy that gradients are asked of, if its dtype has some."""
    platform = get_platform()
    copy = platform.clone(platform.detach(x))
    return platform.set_requires_grad_(copy, True) if has_gradients(copy) else copy


def seed(whole: Any) -> Tensor | None:
    """A gradient of the result in which every element counts differently; None if it has none."""
    platform = get_platform()
    if not platform.is_tensor(whole) or not platform.requires_grad(whole):
        return None
    if not has_gradients(whole):  # an index, which frameworks may say requires a gradient
        return None
    count = math.prod(whole.shape)
    ramp = platform.cast(
        platform.arange(1, count + 1, device=platform.device_of(whole)), platform.dtype_name(whole.dtype)
    )
    return platform.reshape(ramp, tuple(whole.shape)) * (0.25 - 0.125j if is_complex(whole) else 0.25)


def gradients(
    results: Sequence[Any], leaves: Sequence[Tensor], seeded: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Of the leaves, by one backward from all results; zeros for a leaf that no result depends on, None if it has none."""
    platform = get_platform()
    pairs = [
        (x, seed)
        for x, seed in zip(results, seeded, strict=True)
        if seed is not None and platform.requires_grad(x)
    ]
    if all(seed is None for seed in seeded):
        return [None] * len(leaves)
    asked = [i for i, leaf in enumerate(leaves) if platform.requires_grad(leaf)]
    found: Sequence[Tensor | None] = [None] * len(asked)
    if pairs:
        found = platform.grad(
            [x for x, _ in pairs], [leaves[i] for i in asked], [seed for _, seed in pairs], allow_unused=True
        )
    grads: list[Tensor | None] = [None] * len(leaves)
    for i, grad in zip(asked, found, strict=True):
        grads[i] = platform.zeros_like(platform.detach(leaves[i])) if grad is None else grad
    return grads
