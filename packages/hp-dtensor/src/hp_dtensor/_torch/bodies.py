"""Functions of torch that are written in Python and have no rule: their bodies run, and what they call is dispatched.

[Note: running a body] Such a function begins with the question whether an argument's class answers instead of it, and hands
itself over if so; calling it again from there would ask again. So its code runs over a copy of its globals in which the
question is answered with no. The functions that it calls have their own globals and ask as ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from hp_platform.on_platform import once


def _nobody(*_: Any) -> bool:
    return False


_ANSWERS = dict.fromkeys(
    ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _nobody
)


class _Overlaid:
    """A module or class with other values for some of its names."""

    def __init__(self, base: Any, **names: Any) -> None:
        self.__dict__.update(names)
        self._base = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


_TORCH = _Overlaid(torch, overrides=_Overlaid(torch.overrides, **_ANSWERS))


_GO_BELOW = frozenset({torch.Tensor.__dlpack__, torch.Tensor.__dlpack_device__})
"""What hands memory, of which a DTensor has none, to C++ without asking."""


def body_of(function: Any) -> Callable[..., Any] | None:
    """What a function of torch does for plain tensors, as a function that no longer asks; None if it is no Python function."""
    known = _known()
    if function not in known:
        known[function] = _made(function)
    return known[function]


@once
def _known(_: Any) -> dict[Any, Callable[..., Any] | None]:
    """The bodies that were made so far."""
    return {}


def _made(function: Any) -> Callable[..., Any] | None:
    if function in _GO_BELOW:
        return None
    # Operators are wrapped once more, for the sake of their TypeErrors.
    function = inspect.unwrap(function) if isinstance(function, FunctionType) else function
    if not isinstance(function, FunctionType) or not _asks(function):
        return None
    names = {**function.__globals__, **_ANSWERS}
    if "overrides" in function.__code__.co_names and names.get("torch") is torch:
        names["torch"] = _TORCH
    body = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    body.__kwdefaults__, body.__doc__ = function.__kwdefaults__, function.__doc__
    return body


def _asks(function: FunctionType) -> bool:
    return any(name in _ANSWERS for name in function.__code__.co_names)
