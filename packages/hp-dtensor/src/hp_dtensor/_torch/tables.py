"""Which functions of torch follow which rule: the names of :mod:`hp_dtensor._names`, looked up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hp_dtensor import _names
from hp_dtensor.rules import RULES

HOMES = (torch.Tensor, torch, torch.nn.functional, torch.special)
"""Where a name without a dot may stand."""


def found(name: str) -> list[Any]:
    """Every function of torch that goes by a name; a dotted one is looked up below torch."""
    if "." in name:
        home = torch
        for part in name.split(".")[:-1]:
            home = getattr(home, part)
        functions = [getattr(home, name.rpartition(".")[2], None)]
    else:
        # Modules have operators, too, of their own.
        homes = HOMES[:1] if name.startswith("__") else HOMES
        functions = [getattr(home, name, None) for home in homes]
    return [function for function in functions if callable(function)]


def table() -> dict[Any, Any]:
    """Function of torch -> its rule."""
    rules: dict[Any, Any] = {}
    for rule, name in _names.functions():
        rules.update(dict.fromkeys(found(name), _spelled(rule, name)))
    for rule, name in _names.in_place():
        plain = _names.functional_name(name)
        rules.update(dict.fromkeys(found(name), _spelled(rule, plain).writing(found(plain)[0])))
    return rules


def _spelled(rule: str, name: str) -> Any:
    params = _names.params(name)
    return RULES[rule] if params is None else RULES[rule].taking(params)


def method_names() -> Iterator[str]:
    """Names that stand in the table, also of what is no method."""
    for _, name in (*_names.functions(), *_names.in_place()):
        yield name


def method_of(function: Any, rule: Any, dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """A method that dispatches ``function`` at once."""

    def method(*args: Any, **kwargs: Any) -> Any:
        return dispatch(rule, function, args, kwargs)

    method.__name__, method.__doc__ = function.__name__, function.__doc__
    return method
