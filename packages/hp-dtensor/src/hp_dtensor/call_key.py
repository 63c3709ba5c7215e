"""What a plan is found by: the kind of each argument, and its value where the rule looks at it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_dtensor.errors import name_of
from hp_dtensor.rules.registry import Rule
from hp_dtensor.tensor_type import TensorType


def bound(
    rule: Rule, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments in the one form that rules take."""
    try:
        return rule.bind(args, kwargs)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name_of(function)} of a DTensor: {error}") from error


def list_key(
    rule: Rule, function: Any, arg: tuple[Any, ...], of: TensorType
) -> tuple[tuple[Any, ...], list[Any]] | None:
    """Key and local values of a list with tensors; None if a plain tensor is among them."""
    key: list[Any] = []
    local: list[Any] = []
    for x in arg:
        if isinstance(x, of.dtensor):
            key.append(x._spec)
            local.append(x._local)
        elif isinstance(x, of.plain):
            return None
        else:
            key.append((type(x), hashable(rule, function, x)) if rule.by_value else type(x))
            local.append(x)
    return tuple(key), local


def keywords_key(rule: Rule, function: Any, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of arguments that stay keywords."""
    key: list[Any] = []
    for name, value in kwargs.items():
        key.extend((name, type(value)))
        if rule.by_value or type(value) not in (int, float):
            key.append(tuple(value) if isinstance(value, list) else hashable(rule, function, value))
    return tuple(key)


def hashable(rule: Rule, function: Any, arg: Any) -> Any:
    """The argument itself. ValueError if it has no hash."""
    if type(arg).__hash__ is None:
        raise ValueError(
            f"{name_of(function)} of a DTensor got a {type(arg).__name__}, with which rule {rule.name!r} can do nothing: give "
            f"tensors, numbers or tuples of them"
        )
    return arg
