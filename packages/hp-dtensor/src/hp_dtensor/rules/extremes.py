"""Largest and smallest values, and where they are.

The value alone is a Partial "max" or "min" over a cut dim. Where the place is asked for, the ranks gather their candidates,
one value and one index each: the first of equal ones wins, and NaN wins over all, as in the framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hp_dtensor import across
from hp_dtensor.placements import REPLICATE, Partial, Shard
from hp_dtensor.rules.along import (
    checked_keepdim,
    dim_of,
    dims_of,
    dropped,
    lying,
    shape_without,
)
from hp_dtensor.rules.elementwise import pointwise
from hp_dtensor.rules.reduction import lacks_elements, local_sum, neutral, reduced
from hp_dtensor.rules.registry import Outcome, Placements, Result, rule
from hp_dtensor.spec import Spec, local_block
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
        return _of_ranks(x, dim, keepdim, kind, value)

    plan.__doc__ = f"``x.a{kind}(dim, keepdim)``: the {kind} of the ranks' {kind}."


def _of_ranks(x: Spec, dim: Any, keepdim: bool, kind: str, value: Any) -> Outcome:
    """The extreme alone. A Partial of that kind is joined first, since its ties would share the gradient otherwise."""
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
            return shared_among_ties(own, local, x, dims, kind)

        return run

    return replace(outcome, around=around)


def shared_among_ties(own: Tensor, local: Tensor, x: Spec, dims: tuple[int, ...], kind: str) -> Tensor:
    """``own``, this rank's extreme of ``local`` over ``dims``, with a gradient that is shared evenly by all equal elements.

    The reduction of the Partial gives each of the ranks that tie an equal part, and this rank's kernel an equal part of that
    to each element: too little where another rank has fewer of them. So where a gradient is recorded the ranks count
    theirs: three all-reduces of the result's size per mesh dim.
    """
    platform: Any = get_platform()
    if not (platform.requires_grad(own) and platform.is_grad_enabled() and platform.is_floating(own.dtype)):
        return own
    mesh_dims = across.cutting(x, dims)
    value = best = platform.detach(own)
    parts: Tensor = platform.zeros_like(value) + 1
    for mesh_dim in reversed(mesh_dims):  # the rightmost reduces first
        of_line = across.reduced(best, x, (mesh_dim,), kind)
        ties = platform.cast(best == of_line, own.dtype)
        parts, best = parts * across.reduced(ties, x, (mesh_dim,), "sum"), of_line
    rows = platform.reshape(value, shape_without(local.shape, dims, True))
    equal = platform.cast(platform.detach(local) == rows, own.dtype)
    decides = platform.cast(value == best, own.dtype)
    count = platform.reshape(local_sum(equal, dims, True), tuple(own.shape)) * decides
    total = across.reduced(count, x, mesh_dims, "sum")
    ones = platform.zeros_like(total) + 1
    # NaN ties with nothing.
    factor = platform.where(total == 0, ones, parts * count / platform.where(total == 0, ones, total))
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
            if nothing:
                found = tuple(
                    neutral(lambda y: function(y)[0], local, (), {}, dims, keepdim, value)
                    for value in (highest, lowest)
                )
            else:
                named = {} if dim is None else {"dim": dim}
                found = function(local, keepdim=keepdim, **named)
            if not is_cut:
                return found
            return tuple(
                shared_among_ties(own, local, x, dims, kind)
                for own, kind in zip(found, ("min", "max"), strict=True)
            )

        return run

    results = (Result(lower.output, lower.shape), Result(upper.output, upper.shape))
    return Outcome(lower.inputs, None, around=around, outputs=results)


def _max_or_min(name: str, kind: str, value: Any) -> None:
    @rule(name, params=("input", ("dim", None), ("keepdim", False)))
    def plan(x: Any, dim: Any = None, keepdim: bool = False) -> Outcome:
        if isinstance(dim, Spec):
            return pointwise((x, dim))
        if dim is None:
            return _of_ranks(x, None, False, kind, value)
        return _with_indices(x, dim_of(dim, len(x.shape)), checked_keepdim(keepdim), kind == "max", value)

    plan.__doc__ = f"``x.{kind}()``: the {kind} of all; ``x.{kind}(dim)``: the values and their indices; ``x.{kind}(other)``: elementwise."


_max_or_min("max", "max", lowest)
_max_or_min("min", "min", highest)


def _with_indices(x: Spec, dims: tuple[int, ...], keepdim: bool, greater: bool, value: Any) -> Outcome:
    inputs, output = _gathering(x, dims, keepdim)
    result = Result(output, shape_without(x.shape, dims, keepdim))
    mesh_dims = across.cutting(x, dims)
    outcome = Outcome((inputs,), None, outputs=(result, result))
    if not mesh_dims:
        return outcome
    (dim,) = dims
    nothing = lacks_elements(x, outcome, dims)
    size, offset = x.shape[dim], _offsets(x, inputs)[dim]

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(local: Any, *args: Any, **named: Any) -> Any:
            if nothing:
                own = neutral(
                    lambda y, *a, **k: function(y, *a, **k)[0], local, args, named, dims, keepdim, value
                )
                at = _full_like(own, size)
            else:
                own, at = function(local, *args, **named)
                at = at + offset
            best, place = _best(own, at, x, mesh_dims, greater)
            # The gradient goes to the rank whose value it is.
            return get_platform().where(place == at, own, best), place

        return run

    return replace(outcome, around=around)


def _arg(name: str, greater: bool, value: Any) -> None:
    @rule(name, params=("input", ("dim", None), ("keepdim", False)))
    def plan(x: Any, dim: Any = None, keepdim: bool = False) -> Outcome:
        checked_keepdim(keepdim)
        dims = dims_of(None, len(x.shape)) if dim is None else dim_of(dim, len(x.shape))
        inputs, output = _gathering(x, dims, keepdim)
        outcome = Outcome((inputs,), output, shape_without(x.shape, dims, keepdim))
        mesh_dims = across.cutting(x, dims)
        if not mesh_dims:
            return outcome
        nothing = lacks_elements(x, outcome, dims)
        sizes, offsets = [x.shape[d] for d in dims], [_offsets(x, inputs)[d] for d in dims]

        def around(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(local: Any, *args: Any, **named: Any) -> Any:
                platform: Any = get_platform()
                local = platform.detach(local)
                if nothing:
                    at = neutral(function, local, args, named, dims, keepdim, math.prod(sizes))
                    own = platform.full(
                        tuple(at.shape), value(local.dtype), local.dtype, platform.device_of(local)
                    )
                else:
                    at = function(local, *args, **named)
                    own = _value_at(local, at, dim, keepdim)
                    at = _of_the_whole(at, [local.shape[d] for d in dims], sizes, offsets)
                return _best(own, at, x, mesh_dims, greater)[1]

            return run

        return replace(outcome, around=around)

    plan.__doc__ = f"``x.{name}(dim, keepdim)``; without a dim, the index in the flattened whole."


_arg("argmax", True, lowest)
_arg("argmin", False, highest)


def _gathering(x: Spec, dims: tuple[int, ...], keepdim: bool) -> tuple[Placements, Placements]:
    """The input stays cut; along cuts of ``dims`` the result is known to all ranks."""
    inputs = lying(x)
    rest = tuple(REPLICATE if isinstance(p, Shard) and p.dim in dims else p for p in inputs)
    return inputs, dropped(rest, dims, keepdim)


def _offsets(x: Spec, inputs: Placements) -> tuple[int, ...]:
    return local_block(x.shape, inputs, x.mesh.shape, x.mesh.get_coordinate())[1]


def _full_like(x: Tensor, value: int) -> Tensor:
    platform = get_platform()
    return platform.full(tuple(x.shape), value, "int64", platform.device_of(x))


def _value_at(local: Tensor, at: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    """The values at indices that a search gave: of the flattened tensor, or along ``dim``."""
    platform: Any = get_platform()
    if dim is None:
        rows = platform.reshape(local, (math.prod(local.shape), 1))
        return platform.reshape(platform.embedding(platform.reshape(at, (1,)), rows), tuple(at.shape))
    size = local.shape[dim]
    moved = platform.transpose(local, dim, -1) if local.ndim else platform.reshape(local, (1,))
    places = at if keepdim or not local.ndim else _unsqueezed(at, dim % local.ndim)
    places = platform.transpose(places, dim, -1) if local.ndim else places
    lines = platform.reshape(moved, (math.prod(moved.shape), 1))
    starts = platform.arange(0, math.prod(moved.shape[:-1]), device=platform.device_of(local)) * size
    rows = platform.reshape(places, (-1,)) + starts
    found = platform.reshape(platform.embedding(rows, lines), (*moved.shape[:-1], 1))
    return platform.reshape(platform.transpose(found, dim, -1), tuple(at.shape))


def _unsqueezed(x: Tensor, dim: int) -> Tensor:
    return get_platform().reshape(x, (*x.shape[:dim], 1, *x.shape[dim:]))


def _of_the_whole(
    at: Tensor, local_sizes: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]
) -> Tensor:
    """Flat indices in this rank's block as flat indices in the whole."""
    inner_local, inner, found = 1, 1, None
    for n, size, offset in reversed(list(zip(local_sizes, sizes, offsets, strict=True))):
        own = ((at // inner_local) % n + offset) * inner
        found = own if found is None else found + own
        inner_local, inner = inner_local * n, inner * size
    return at if found is None else found


def _best(own: Tensor, at: Tensor, x: Spec, mesh_dims: Sequence[int], greater: bool) -> tuple[Tensor, Tensor]:
    """The best of the ranks' values and where it is, on all ranks: two all-gathers of the result's size per mesh dim."""
    where = get_platform().where
    values, places = across.gathered(own, x, mesh_dims), across.gathered(at, x, mesh_dims)
    best, place = values[0], places[0]
    for value, index in zip(values[1:], places[1:], strict=True):
        is_nan, was_nan = value != value, best != best
        better = (value > best) if greater else (value < best)
        equal = (value == best) | (is_nan & was_nan)
        wins = ((better | is_nan) & ~was_nan) | (equal & (index < place))
        best, place = where(wins, value, best), where(wins, index, place)
    return best, place
