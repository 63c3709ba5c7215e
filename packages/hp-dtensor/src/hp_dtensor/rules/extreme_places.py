"""Where the largest and smallest values are: max, min, argmax and argmin.

Over a cut dim the ranks gather their candidates, one value and one index each: the first of equal ones wins, and NaN wins
over all, as in the framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor import across
from hp_dtensor.nest import rebuilt
from hp_dtensor.placements import REPLICATE, Shard
from hp_dtensor.rules.along import checked_keepdim, dim_of, dims_of, dropped, lying, shape_without
from hp_dtensor.rules.elementwise import pointwise
from hp_dtensor.rules.extremes import highest, lowest, of_ranks, one_element
from hp_dtensor.rules.reduction import lacks_elements, neutral
from hp_dtensor.rules.registry import Outcome, Placements, Result, rule
from hp_dtensor.spec import Spec, local_block
from hp_platform import get_platform

Tensor = Any


def _max_or_min(name: str, kind: str, value: Any) -> None:
    @rule(name, params=("input", ("dim", None), ("keepdim", False)))
    def plan(x: Any, dim: Any = None, keepdim: bool = False) -> Outcome:
        if isinstance(dim, Spec):
            return pointwise((x, dim))
        if dim is None:
            return of_ranks(x, None, False, kind, value)
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
            found = function(one_element(local) if nothing else local, *args, **named)
            if nothing:
                own = neutral(
                    lambda y, *a, **k: function(y, *a, **k)[0], local, args, named, dims, keepdim, value
                )
                at = _full_like(own, size)
            else:
                own, at = found
                at = at + offset
            best, place = _best(own, at, x, mesh_dims, greater)
            # The gradient goes to the rank whose value it is.
            return rebuilt(found, [get_platform().where(place == at, own, best), place])

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
