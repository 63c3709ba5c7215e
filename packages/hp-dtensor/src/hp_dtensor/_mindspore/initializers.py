"""MindSpore's initializers as draws of :mod:`hp_dtensor.random`: the same distributions, equal values for every sharding."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import mindspore
from mindspore.common import initializer as stock

from hp_dtensor import random
from hp_dtensor.rng.places import is_dtensor
from hp_platform import get_platform


def check_known(initializer: Any, what: str) -> None:
    """NotImplementedError for an initializer without an entry here; subclasses may do anything, so they have none."""
    if not _is_known(initializer):
        known = ", ".join(cls.__name__ for cls in _FILL)
        raise NotImplementedError(
            f"mindspore {mindspore.__version__}: initializer {type(initializer).__name__} of {what} fills whole arrays, and is not "
            f"drawn in pieces; those that are: {known}. Give init_parameters(initializers={{name: function}}) a function that "
            f"writes the parameter, with hp_dtensor.random for instance"
        )


def fill(x: Any, initializer: Any, *, is_needed: bool) -> None:
    """Write the values into a DTensor or plain tensor. Unknown initializers pass where something else will write."""
    if is_needed or _is_known(initializer):
        _FILL[type(initializer)](x, initializer)


def _is_known(initializer: Any) -> bool:
    is_constant = type(initializer) is stock.Constant
    return type(initializer) in _FILL and (not is_constant or isinstance(initializer.value, numbers.Number))


def _constant(x: Any, value: Any) -> None:
    if is_dtensor(x):
        x.fill_(value)
    else:
        get_platform().fill_(x, value)


def _he(draw: Callable[..., Any]) -> Callable[[Any, Any], None]:
    def write(x: Any, init: Any) -> None:
        # MindSpore's names of layers without a nonlinearity behind them.
        is_linear = init.nonlinearity == "linear" or init.nonlinearity.startswith("conv")
        slope = 0.01 if init.negative_slope is None else init.negative_slope
        draw(x, slope, init.mode, "linear" if is_linear else init.nonlinearity)

    return write


_FILL: dict[type, Callable[[Any, Any], Any]] = {
    stock.Zero: lambda x, _: _constant(x, 0),
    stock.One: lambda x, _: _constant(x, 1),
    stock.Constant: lambda x, init: _constant(x, init.value),
    stock.Uniform: lambda x, init: random.uniform_(x, -init.scale, init.scale),
    stock.Normal: lambda x, init: random.normal_(x, init.mean, init.sigma),
    stock.TruncatedNormal: lambda x, init: random.trunc_normal_(x, init.mean, init.sigma, init.a, init.b),
    stock.XavierUniform: lambda x, init: random.xavier_uniform_(x, init.gain),
    stock.XavierNormal: lambda x, init: random.xavier_normal_(x, init.gain),
    stock.HeUniform: _he(random.kaiming_uniform_),
    stock.HeNormal: _he(random.kaiming_normal_),
}
