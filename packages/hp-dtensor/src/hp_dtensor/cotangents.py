"""Gradients of sums, where they pass between the graph of local tensors and the user's hands, so that they can be differentiated.

[Note: gradients of gradients] The local gradient of a sum (Partial) is equal on all ranks, and as a DTensor it is Replicate.
But of what flows back into it when it is differentiated itself, the local graph holds summands: the node below it (an
all-reduce, whose backward is a mark) sums them up. Of a Replicate DTensor every rank holds the whole. So there stands an
identity in between whose backward makes the one of the other. Nothing stands there unless the gradient is differentiable.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hp_dtensor import conversions
from hp_dtensor.marks import mark
from hp_dtensor.spec import Spec
from hp_platform import get_platform
from hp_platform.on_platform import once

Tensor = Any


def gradient_of_dtensor(gradient: Tensor, spec: Spec) -> Tensor:
    """The local gradient of a DTensor of ``spec``, for a DTensor of ``spec.grad``. Backward: one rank keeps. No communication."""
    for dim in _sums(gradient, spec):
        is_first = spec.mesh.get_coordinate()[dim] == 0
        gradient = _functions().Handed.apply(gradient, is_first)
    return gradient


def gradient_for_local(gradient: Tensor, spec: Spec) -> Tensor:
    """The other way. Backward: one all-reduce for each mesh dim along which ``spec`` is a sum."""
    dims = _sums(gradient, spec)
    return mark(gradient, spec, dims) if dims else gradient


def _sums(gradient: Tensor, spec: Spec) -> tuple[int, ...]:
    if spec.grad is spec:  # no sum at all
        return ()
    platform = get_platform()
    if not (platform.requires_grad(gradient) and platform.is_grad_enabled()):
        return ()
    return tuple(i for i, p in enumerate(spec.placements) if p.is_partial("sum") and spec.mesh.shape[i] > 1)


@once
def _functions(platform: Any) -> SimpleNamespace:
    class Handed(platform.Function):
        @staticmethod
        def forward(ctx: Any, gradient: Tensor, is_first: bool) -> Tensor:
            ctx.is_first = is_first
            return platform.detach(gradient)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
            return conversions.keep_on(g, ctx.is_first), None

    return SimpleNamespace(Handed=Handed)
