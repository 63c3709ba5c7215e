"""Nests of lists, tuples and dicts with tensors in them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any


def map_leaves(function: Callable[[Any], Any], nest: Any) -> Any:
    """The same nest with ``function`` of every entry that is no list, tuple or dict; the very object if nothing changes."""
    if isinstance(nest, MutableMapping):
        entries = {key: map_leaves(function, entry) for key, entry in nest.items()}
        if all(entries[key] is entry for key, entry in nest.items()):
            return nest
        result = copy.copy(nest)  # keeps the class, also of dicts that are results of a model
        for key, entry in entries.items():
            result[key] = entry
        return result
    if isinstance(nest, (list, tuple)):
        values = [map_leaves(function, entry) for entry in nest]
        if all(value is entry for value, entry in zip(values, nest, strict=True)):
            return nest
        return rebuilt(nest, values)
    return function(nest)


def leaves(nest: Any) -> Iterator[Any]:
    """Every entry that is no list, tuple or dict."""
    if isinstance(nest, Mapping):
        nest = list(nest.values())
    if isinstance(nest, (list, tuple)):
        for entry in nest:
            yield from leaves(entry)
    else:
        yield nest


def rebuilt(like: Any, values: list[Any]) -> Any:
    """``values`` in a list, tuple or tuple with names like ``like``."""
    make = getattr(type(like), "_make", None)
    if make is not None:
        return make(values)
    return type(like)(values)
