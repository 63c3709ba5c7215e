"""Largest and smallest values: over a cut dim a Partial "max" or "min" of what the ranks have."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hp_dtensor import across
from hp_dtensor.nest import rebuilt
from hp_dtensor.placements import Partial
from hp_dtensor.reductions import alike
from hp_dtensor.rules.along import shape_without
from hp_dtensor.rules.reduction import lacks_elements, local_sum, neutral, reduced
from hp_dtensor.rules.registry import Outcome, Result, rule
from hp_dtensor.spec import Spec
from hp_platform import get_platform
from hp_platform.on_platform import once

Tensor = Any


def lowest(dtype: Any) -> Any:
    """What no value of the dtype is below."""
    return _bound(dtype, -1)


def highest(dtype: Any) -> Any:
    """What no value of the dtype is above."""
    return _bound(dtype, 1)


def _bound(dtype: Any, sign: int) -> Any:
    platform = get_platform()
    name = platform.dtype_name(dtype)
    if platform.is_floating(dtype):
        return sign * math.inf
    if name == "bool":
        return sign > 0
    bits = 8 * platform.itemsize(dtype)
    if name.startswith("u"):
        return 2**bits - 1 if sign > 0 else 0
    return 2 ** (bits - 1) - 1 if sign > 0 else -(2 ** (bits - 1))


def _extreme(name: str, kind: str, value: Any) -> None:
    @rule(name, params=("input", ("dim", None), ("keepdim", False)))
    def plan(x: Any, dim: Any = None, keepdim: bool = False) -> Outcome:
        return of_ranks(x, dim, keepdim, kind, value, math.nan)

    plan.__doc__ = f"``x.a{kind}(dim, keepdim)``: the {kind} of the ranks' {kind}."


def of_ranks(x: Spec, dim: Any, keepdim: bool, kind: str, value: Any, at_nan: float | None = None) -> Outcome:
    """The extreme alone. A Partial of that kind is joined first, since its ties would share the gradient otherwise.

    ``value`` is what no value is beyond; ``at_nan``: see :func:`shared_among_ties`.
    """
    outcome, dims, is_cut = reduced(x, dim, keepdim, (), Partial(kind))
    if not is_cut:
        return outcome
    nothing = lacks_elements(x, outcome, dims)

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(local: Any, *args: Any, **named: Any) -> Any:
            own = (
                neutral(function, local, args, named, dims, keepdim, value)
                if nothing
                else function(local, *args, **named)
            )
            return shared_among_ties(own, local, x, dims, kind, at_nan)

        return run

    return replace(outcome, around=around)


def one_element(local: Tensor) -> Tensor:
    """What a function is asked with for what it gives, where this rank has nothing: its kernels refuse no elements.

    It requires a gradient if ``local`` does, so that the results say whether the function has one.
    """
    platform: Any = get_platform()
    probe = platform.zeros((1,) * local.ndim, local.dtype, platform.device_of(local))
    return platform.set_requires_grad_(probe, True) if platform.requires_grad(local) else probe


def shared_among_ties(
    own: Tensor, local: Tensor, x: Spec, dims: tuple[int, ...], kind: str, at_nan: float | None = None
) -> Tensor:
    """``own``, this rank's extreme of ``local`` over ``dims``, with a gradient that is shared evenly by all equal elements.

    The reduction of the Partial gives each of the ranks that tie an equal part, and this rank's kernel an equal part of that
    to each element: too little where another rank has fewer of them. So where a gradient is recorded the ranks count
    theirs: three all-reduces of the result's size per mesh dim.

    NaN is the extreme wherever it is, and ties with NaN. ``at_nan`` is for functions that do not share the gradient among those:
    what they multiply it by for all elements, NaN (amax, amin, aminmax) or 0 (norms).
    """
    platform: Any = get_platform()
    if not (platform.requires_grad(own) and platform.is_grad_enabled() and platform.is_floating(own.dtype)):
        return own
    mesh_dims = across.cutting(x, dims)
    value = best = platform.detach(own)
    parts: Tensor = platform.zeros_like(value) + 1
    for mesh_dim in reversed(mesh_dims):  # the rightmost reduces first
        of_line = across.reduced(best, x, (mesh_dim,), kind)
        ties = platform.cast(alike(best, of_line), own.dtype)
        parts, best = parts * across.reduced(ties, x, (mesh_dim,), "sum"), of_line
    rows = platform.reshape(value, shape_without(local.shape, dims, True))
    equal = platform.cast(alike(platform.detach(local), rows), own.dtype)
    decides = platform.cast(alike(value, best), own.dtype)
    count = platform.reshape(local_sum(equal, dims, True), tuple(own.shape)) * decides
    factor = parts * count / across.reduced(count, x, mesh_dims, "sum")
    if at_nan is not None:
        factor = platform.where(best == best, factor, platform.zeros_like(factor) + at_nan)
    return _functions().Scaled.apply(own, factor)


@once
def _functions(platform: Any) -> SimpleNamespace:
    class Scaled(platform.Function):
        """The identity, whose gradient is multiplied."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
            ctx.factor = factor
            return platform.detach(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return g * ctx.factor, None

    return SimpleNamespace(Scaled=Scaled)


_extreme("amax", "max", lowest)
_extreme("amin", "min", highest)


def _aminmax_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """torch takes dim and keepdim by keyword only."""
    rest = dict(kwargs)
    x = args[0] if args else rest.pop("input")
    dim = args[1] if len(args) > 1 else rest.pop("dim", None)
    return (x, dim, args[2] if len(args) > 2 else rest.pop("keepdim", False)), rest


@rule("aminmax", params=("input",), normalise=_aminmax_arguments)
def aminmax(x: Any, dim: Any = None, keepdim: bool = False) -> Outcome:
    """The smallest and the largest value."""
    lower, dims, is_cut = reduced(x, dim, keepdim, (), Partial("min"))
    upper, _, _ = reduced(x, dim, keepdim, (), Partial("max"))
    assert lower.output is not None and upper.output is not None
    nothing = is_cut and lacks_elements(x, lower, dims)

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(local: Any, *_: Any) -> Any:
            named = {} if dim is None else {"dim": dim}
            found = function(one_element(local) if nothing else local, keepdim=keepdim, **named)
            if not is_cut:
                return found
            own = found
            if nothing:
                own = [
                    neutral(lambda y: function(y)[0], local, (), {}, dims, keepdim, value)
                    for value in (highest, lowest)
                ]
                if not get_platform().requires_grad(found[0]):
                    # Not every version of a framework has its derivative, and ranks with elements know of none then.
                    own = [get_platform().detach(one) for one in own]
            shared = [
                shared_among_ties(one, local, x, dims, kind, math.nan)
                for one, kind in zip(own, ("min", "max"), strict=True)
            ]
            return rebuilt(found, shared)

        return run

    results = (Result(lower.output, lower.shape), Result(upper.output, upper.shape))
    return Outcome(lower.inputs, None, around=around, outputs=results)
