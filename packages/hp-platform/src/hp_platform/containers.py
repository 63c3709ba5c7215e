"""Tensors inside of what modules take and return: lists, tuples, named tuples, dicts and dataclasses, nested at will."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Classes of what is no container."""


def map_tensors(is_tensor: Callable[[Any], bool], function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with every tensor ``x`` in it replaced by ``function(x)``.

    Containers are made anew only where something in them changes, so what holds no tensor keeps its identity; an object
    of a class that is no container is passed through as it is.
    """
    if is_tensor(value):
        return function(value)
    if type(value) in ATOMS:  # asked at every call of every unit: what is no container is told at once
        return value

    def inside(part: Any) -> Any:
        # As above: members that hold nothing are passed without a call.
        if type(part) in ATOMS:
            return part
        return function(part) if is_tensor(part) else map_tensors(is_tensor, function, part)

    if isinstance(value, dict) or (not isinstance(value, (list, tuple)) and isinstance(value, Mapping)):
        if not value:
            return value
        changed = {key: inside(part) for key, part in value.items()}
        if all(changed[key] is value[key] for key in changed):
            return value
        return _like_mapping(value, changed)
    if isinstance(value, (list, tuple)):
        parts = [inside(part) for part in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        # A named tuple takes its fields one by one, other sequences one iterable.
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        fields = {name: inside(getattr(value, name)) for name in names}
        if all(fields[name] is getattr(value, name) for name in names):
            return value
        # Not dataclasses.replace: it would run __post_init__ again, and refuses fields with init=False.
        twin = copy.copy(value)
        for name, part in fields.items():
            object.__setattr__(twin, name, part)
        return twin
    return value


def tensors_in(is_tensor: Callable[[Any], bool], value: Any) -> Iterator[Any]:
    """All tensors in ``value``, in order; one that stands there twice comes twice."""
    found: list[Any] = []

    def note(x: Any) -> Any:
        found.append(x)
        return x

    if is_tensor(value):
        yield value
        return
    map_tensors(is_tensor, note, value)
    yield from found


def _like_mapping(value: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """A copy of the mapping with other values: the copy keeps its class and what else it carries (default factories)."""
    if type(value) is dict:
        return changed
    twin: Any = copy.copy(value)
    for key, part in changed.items():
        twin[key] = part
    return twin
