"""Elementwise operations: unary, binary and ternary, with broadcasting.

Only what is linear carries a Partial: the sum over ranks of ``f(x_r)`` is ``f`` of the sum for negation, casts to a
floating dtype, products with a replicated factor and quotients by one, sums of summands. Everything else reduces first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hp_dtensor.placements import PARTIAL, REDUCE_OPS, REPLICATE, Partial, Placement, Shard
from hp_dtensor.rules.along import SUMS, has_fractions, lying
from hp_dtensor.rules.choice import Way, choose
from hp_dtensor.rules.registry import EVERY_KIND, Outcome, Result, rule
from hp_dtensor.spec import Spec


def broadcast_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The common shape of operands: sizes are aligned from the last dim on, and 1 fits any. ValueError if they do not fit."""
    ndim = max(map(len, shapes))
    result = []
    for dim in range(ndim):
        sizes = {shape[dim - ndim] for shape in shapes if len(shape) >= ndim - dim} - {1}
        if len(sizes) > 1:
            raise ValueError(
                f"shapes {', '.join(map(str, shapes))} do not broadcast: dim {dim - ndim} differs"
            )
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def pointwise(args: Sequence[Any], partial_ways: Any = None) -> Outcome:
    """Any elementwise operation. ``partial_ways(placements, args)`` gives the ways that carry a sum along one mesh dim."""
    at = [i for i, arg in enumerate(args) if isinstance(arg, Spec)]
    specs = [args[i] for i in at]
    shape = broadcast_shape([spec.shape for spec in specs])
    wanted: list[list[Placement]] = [[] for _ in specs]
    output: list[Placement] = []
    for mesh_dim in range(len(specs[0].placements)):
        now = [spec.placements[mesh_dim] for spec in specs]
        ways = _sharded_ways(specs, now, shape)
        if partial_ways is not None and any(isinstance(p, Partial) for p in now):
            ways = [*ways, *partial_ways(now, args)]
        ways = [*ways, Way((REPLICATE,) * len(specs), REPLICATE)]
        way = choose(specs, mesh_dim, ways, math.prod(shape))
        output.append(way.output)
        for list_of_one, placement in zip(wanted, way.inputs, strict=True):
            list_of_one.append(placement)
    inputs: list[Any] = [None] * len(args)
    for i, placements in zip(at, wanted, strict=True):
        inputs[i] = tuple(placements)
    return Outcome(tuple(inputs), tuple(output), shape)


def _sharded_ways(specs: Sequence[Spec], now: Sequence[Placement], shape: tuple[int, ...]) -> list[Way]:
    """For each dim of the result that an operand is cut along: all operands cut there, those that broadcast whole."""
    ndim = len(shape)
    ways = []
    for spec, placement in zip(specs, now, strict=True):
        if (
            isinstance(placement, Shard)
            and spec.shape[placement.dim] == shape[placement.dim - len(spec.shape)]
        ):
            dim = placement.dim + ndim - len(spec.shape)
            ways.append(Way(tuple(_cut_along(other, dim, shape) for other in specs), Shard(dim)))
    return ways


def _cut_along(spec: Spec, dim: int, shape: tuple[int, ...]) -> Placement:
    own = dim - (len(shape) - len(spec.shape))
    return Shard(own) if own >= 0 and spec.shape[own] == shape[dim] else REPLICATE


def _common_sum(now: Sequence[Placement]) -> Placement:
    """Averages stay averages among themselves; beside sums they are made sums."""
    kinds = {p for p in now if isinstance(p, Partial)}
    return kinds.pop() if len(kinds) == 1 else PARTIAL


def _sum_of_all(now: Sequence[Placement], args: Sequence[Any]) -> list[Way]:
    if not all(isinstance(arg, Spec) for arg in args[:2]):
        return []  # a number is added once, not by every rank
    common = _common_sum(now)
    return [Way((common,) * len(now), common)]


def factor_of_one(now: Sequence[Placement], args: Sequence[Any], carriers: Sequence[int]) -> list[Way]:
    """The ways in which one of the positions ``carriers`` is a sum and the other operand a plain factor."""
    at = [i for i, arg in enumerate(args) if isinstance(arg, Spec)]
    ways = []
    for place, position in enumerate(at):
        if position in carriers and isinstance(now[place], Partial):
            inputs = tuple(now[place] if other == place else REPLICATE for other in range(len(at)))
            ways.append(Way(inputs, now[place]))
    return ways


@rule("pointwise", params=("input", "other"), by_value=False)
def _nonlinear(*args: Any, **kwargs: Any) -> Outcome:
    """Anything elementwise that is not linear: relu, exp, pow, maximum, where, comparisons ..."""
    return pointwise(args)


@rule("where", by_value=False)
def _where(condition: Any, x: Any = None, y: Any = None) -> Outcome:
    """Elementwise choice, linear in what is chosen from. With the condition alone it would be a search, whose result has no
    shape known before.
    """
    if x is None or y is None:
        raise ValueError(
            "where takes a condition and two values: for the places of what is true use nonzero(as_tuple=True)"
        )
    return pointwise((condition, x, y), _of_chosen)


def _of_chosen(now: Sequence[Placement], args: Sequence[Any]) -> list[Way]:
    if not all(isinstance(arg, Spec) for arg in args):
        return []  # a number is chosen once, not by every rank
    common = _common_sum(now[1:])
    return [Way((REPLICATE, common, common), common)]


@rule("identity", params=("input",), by_value=False)
def _linear_unary(*args: Any, **kwargs: Any) -> Outcome:
    """Elementwise and linear in its one tensor: casts to a floating or complex dtype under their own name."""
    return pointwise(args, lambda now, _: [Way((now[0],), now[0])])


@rule("copied", params=("input",), by_value=False, carries=EVERY_KIND)
def _copied(*args: Any, **kwargs: Any) -> Outcome:
    """The same values: clone, contiguous, positive."""
    return _linear_unary(*args, **kwargs)


@rule(
    "conjugated",
    params=("input",),
    by_value=False,
    views=True,
    carries={kind: kind for kind in REDUCE_OPS if kind != "prod"},
)
def _conjugated(*args: Any, **kwargs: Any) -> Outcome:
    """conj, real, imag: of a sum of complex numbers the summands', but not of a product. Of real numbers themselves."""
    return _linear_unary(*args, **kwargs)


@rule("view_as_real", params=("input",), views=True, carries={})
def _view_as_real(x: Any) -> Outcome:
    """Complex numbers as pairs in a new last dim. Of a sum the summands'."""
    return Outcome((x.placements,), x.placements, (*x.shape, 2))


@rule("view_as_complex", params=("input",), views=True, carries={})
def _view_as_complex(x: Any) -> Outcome:
    """Pairs along the last dim, which is joined, as complex numbers. Of a sum the summands'."""
    if not x.shape or x.shape[-1] != 2:
        raise ValueError(f"the last dim holds real and imaginary parts, got shape {x.shape}")
    lies = lying(x, (len(x.shape) - 1,), SUMS)
    return Outcome((lies,), lies, x.shape[:-1])


@rule("frexp", params=("input",))
def _frexp(x: Any) -> Outcome:
    """Numbers as mantissas and powers of two: two results."""
    lies = lying(x)
    result = Result(lies, x.shape)
    return Outcome((lies,), None, outputs=(result, result))


@rule("negated", params=("input",), by_value=False, carries={"max": "min", "min": "max"})
def _negated(*args: Any, **kwargs: Any) -> Outcome:
    """neg. Linear; a maximum becomes a minimum."""
    return _linear_unary(*args, **kwargs)


@rule("cast", params=("input", "dtype"))
def _cast(x: Any, dtype: Any, *flags: Any, **kwargs: Any) -> Outcome:
    """``x.to(dtype)``. Truncation is not linear, so a Partial is carried only to a floating or complex dtype."""
    if not isinstance(x, Spec) or isinstance(dtype, Spec):
        raise ValueError("a DTensor is converted by to(dtype) with a dtype, not with another tensor")
    # MindSpore hands its primitive the number of the dtype: whether that is floating is not known here.
    keeps = not isinstance(dtype, int) and has_fractions(dtype)
    args = (x, dtype, *flags)
    return _linear_unary(*args, **kwargs) if keeps else pointwise(args)


@rule("add", params=("input", "other"), by_value=False)
def _add(*args: Any, **kwargs: Any) -> Outcome:
    """Sums and differences, also scaled by ``alpha``: summands of one and summands of the other are summands of the result."""
    return pointwise(args, _sum_of_all)


@rule("mul", params=("input", "other"), by_value=False)
def _mul(*args: Any, **kwargs: Any) -> Outcome:
    """Products: one factor may be a sum, if the other one is whole."""
    return pointwise(args, lambda now, given: factor_of_one(now, given, (0, 1)))


@rule("div", params=("input", "other"), by_value=False)
def _div(*args: Any, **kwargs: Any) -> Outcome:
    """True division: the numerator may be a sum. With a rounding mode it is not linear."""
    if any(mode is not None for mode in (*args[2:], kwargs.get("rounding_mode"))):
        return pointwise(args)
    return pointwise(args, lambda now, given: factor_of_one(now, given, (0,)))


@rule("reversed_div", params=("input", "other"), by_value=False)
def _reversed_div(*args: Any, **kwargs: Any) -> Outcome:
    """``other / input``: what ``2 / x`` calls."""
    return pointwise(args, lambda now, given: factor_of_one(now, given, (1,)))
