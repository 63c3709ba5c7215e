"""Reductions as numpy spells them: ``axis``, ``keepdims``, ``ddof``, and an extreme without its index.

Methods of some tensors follow numpy where functions of the same name follow torch. The rules are those of the other files;
here stands how the arguments are read, and how the local operation is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hp_dtensor.nest import rebuilt
from hp_dtensor.no_elements import zeros_from
from hp_dtensor.rules.along import dims_of, shape_without
from hp_dtensor.rules.registry import RULES, Outcome, rule
from hp_platform import get_platform

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Call = Callable[..., Any]


def _read(args: tuple[Any, ...], kwargs: dict[str, Any], *params: tuple[str, Any]) -> tuple[Any, ...]:
    """The values of ``params`` (names with defaults) after the tensor, by position or name."""
    given = dict(zip(("input", *(name for name, _ in params)), args, strict=False))
    unknown = set(kwargs) - {name for name, _ in params}
    if unknown or len(args) > 1 + len(params):
        raise ValueError(
            f"takes {', '.join(name for name, _ in params)}, not {', '.join(sorted(unknown)) or 'more'}"
        )
    given.update(kwargs)
    values = (given.get(name, default) for name, default in params)
    return (args[0], *(tuple(value) if isinstance(value, list) else value for value in values))


def _called(outcome: Outcome, adapt: Callable[[Call], Call]) -> Outcome:
    """The outcome, with the operation called in another way by whatever works with it."""
    around = outcome.around
    return replace(outcome, around=adapt if around is None else lambda function: around(adapt(function)))


def _also_of_nothing(call: Call, ndim: int, dim: Any, keepdim: bool) -> Call:
    """``call``, whose kernels refuse a tensor without elements also where only dims that stay have none."""

    def run(local: Any, *args: Any, **named: Any) -> Any:
        if 0 not in local.shape:
            return call(local, *args, **named)
        platform = get_platform()
        device = platform.device_of(local)
        with platform.no_grad():
            found = call(
                platform.zeros(tuple(n or 1 for n in local.shape), local.dtype, device), *args, **named
            )
        shape = shape_without(local.shape, dims_of(dim, ndim), keepdim)

        def empty(x: Any) -> Any:
            like = platform.zeros(shape, x.dtype, device)
            return zeros_from(like, [local]) if platform.is_floating(x.dtype) else like

        return rebuilt(found, [empty(x) for x in found]) if isinstance(found, tuple) else empty(found)

    return run


def _moment(name: str) -> None:
    def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        if set(kwargs) & {"dim", "correction", "unbiased", "keepdim"}:
            normalise = RULES[name].normalise
            assert normalise is not None
            values, rest = normalise(args, kwargs)
            return (*values, False), rest
        return (*_read(args, kwargs, ("axis", None), ("ddof", 0), ("keepdims", False)), True), {}

    @rule(f"{name}_by_axis", normalise=arguments)
    def plan(x: Any, dim: Any, correction: Any, keepdim: bool, by_axis: bool) -> Outcome:
        outcome = RULES[name].plan(x, dim, correction, keepdim)
        if not by_axis:
            return outcome

        def adapt(function: Call) -> Call:
            return lambda local, **_: function(local, dim, correction, keepdim)

        return _called(outcome, adapt)

    plan.__doc__ = f"``x.{name}(axis=None, ddof=0, keepdims=False)``."


_moment("var")
_moment("std")


def _extreme(name: str) -> None:
    def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        names = {"axis", "keepdims"} & set(kwargs)
        if not names:
            values = (*_read(args, kwargs, ("dim", None), ("keepdim", False)), False)
            return values, {}
        return (*_read(args, kwargs, ("axis", None), ("keepdims", False)), True), {}

    @rule(f"{name}_by_axis", normalise=arguments)
    def plan(x: Any, dim: Any, keepdim: bool, by_axis: bool) -> Outcome:
        if not by_axis:
            given = (x,) if dim is None else (x, dim, keepdim)
            return _called(
                RULES[name].plan(*given),
                lambda function: _also_of_nothing(
                    lambda local, *_: function(local, *given[1:]), len(x.shape), dim, keepdim
                ),
            )

        def adapt(function: Call) -> Call:
            return _also_of_nothing(
                lambda local, *_: function(local, axis=dim, keepdims=keepdim), len(x.shape), dim, keepdim
            )

        return _called(RULES[f"a{name}"].plan(x, dim, keepdim), adapt)

    plan.__doc__ = f"``x.{name}(axis=)`` is the value alone, ``x.{name}(dim)`` has the index, too."


_extreme("max")
_extreme("min")


def _aminmax_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return _read(args, kwargs, ("axis", 0), ("keepdims", False)), {}


@rule("aminmax_by_axis", normalise=_aminmax_arguments)
def aminmax(x: Any, dim: Any, keepdim: bool) -> Outcome:
    """``x.aminmax(axis=0, keepdims=False)``."""

    def adapt(function: Call) -> Call:
        return _also_of_nothing(
            lambda local, **_: function(local, axis=dim, keepdims=keepdim), len(x.shape), dim, keepdim
        )

    return _called(RULES["aminmax"].plan(x, dim, keepdim), adapt)
