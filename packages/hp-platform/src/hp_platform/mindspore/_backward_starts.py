"""With which tensors and gradients a backward begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np

from hp_platform.mindspore import _private
from hp_platform.mindspore._dtypes import NAME_OF
from hp_platform.mindspore._recording import ensure_recording


def inner(tensors: Sequence[Any], grads: Sequence[Any] | None) -> tuple[Sequence[Any], Sequence[Any] | None]:
    """Where tensors that stand for local ones (hp-dtensor's) start, with which gradients: the graph knows the local ones only."""
    if not any(hasattr(x, "_start_of_backward") for x in tensors):
        return tensors, grads
    given: Sequence[Any] = [None] * len(tensors) if grads is None else grads
    pairs = [
        x._start_of_backward(g)
        if hasattr(x, "_start_of_backward")
        else (x, starts_of([x], None if g is None else [g], "backward", "grads")[0])
        for x, g in zip(tensors, given, strict=True)
    ]
    return [x for x, _ in pairs], [g for _, g in pairs]


def starts_of(
    tensors: Sequence[mindspore.Tensor],
    grads: Sequence[mindspore.Tensor] | None,
    function: str,
    argument: str,
) -> tuple[mindspore.Tensor, ...]:
    """The gradients that a backward begins with, checked."""
    ensure_recording()
    for place, x in enumerate(tensors):
        if not _private.requires_grad(x):
            raise RuntimeError(
                f"{function}: tensor {place} of shape {tuple(x.shape)} was not recorded: nothing behind it requires a gradient, "
                "or it was computed under no_grad"
            )
    if grads is None:
        shapes = [tuple(x.shape) for x in tensors if x.ndim != 0]
        if shapes:
            raise ValueError(
                f"{function} without {argument} starts from ones, for 0-d tensors only; got shapes {shapes}: "
                f"reduce them to a scalar, or pass {argument} of the same shapes"
            )
        return tuple(mindspore.Tensor(np.ones((), np.float32)).astype(x.dtype) for x in tensors)
    if len(grads) != len(tensors):
        raise ValueError(f"{function}: {len(tensors)} tensors but {len(grads)} {argument}")
    for place, (x, grad) in enumerate(zip(tensors, grads, strict=True)):
        if x.shape != grad.shape or x.dtype != grad.dtype:
            raise ValueError(
                f"{function}: {argument}[{place}] must be like its tensor, {tuple(x.shape)} {NAME_OF.get(x.dtype)}; "
                f"got {tuple(grad.shape)} {NAME_OF.get(grad.dtype)}"
            )
    return tuple(grads)
