"""How many heads an attention module has: from its attributes, from a configuration, from the shapes of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hp_tp.plans.names import CONFIGURATION, HEAD_DIM, HEADS, KEY_VALUE_HEADS


@dataclass(frozen=True)
class Heads:
    """The heads of one attention module."""

    queries: int
    keys: int
    """Of keys, and as many of values."""
    size: int
    """Features of a head."""


def heads_of(
    module: Any, root: Any, query_rows: int | None, key_rows: int | None, qkv_rows: int | None
) -> Heads | None:
    """The heads of an attention module; None where nothing tells them, or what tells them does not fit the weights.

    ``query_rows`` and ``key_rows`` are the output features of its projections, ``qkv_rows`` of a fused one. What stands nearer
    counts first: attributes of the module, its configuration, that of the whole model.
    """
    sources = list(_sources(module, root))
    queries, keys, size = (_first(sources, names) for names in (HEADS, KEY_VALUE_HEADS, HEAD_DIM))
    if query_rows is None or key_rows is None:
        if qkv_rows is None or queries is None:
            return None
        keys = queries if keys is None else keys
        size = qkv_rows // (queries + 2 * keys) if size is None else size
        return Heads(queries, keys, size) if (queries + 2 * keys) * size == qkv_rows else None
    if size is None:
        if not queries or query_rows % queries:
            return None
        size = query_rows // queries
    if not size or query_rows % size or key_rows % size:
        return None
    found = Heads(query_rows // size, key_rows // size, size)
    told = (queries in (None, found.queries), keys in (None, found.keys))
    return found if all(told) else None


def has_own_counts(module: Any) -> bool:
    """Whether the module keeps numbers of heads in attributes, from which its code may make shapes."""
    return any(_number(module, name) is not None for name in (*HEADS, *KEY_VALUE_HEADS))


def configuration_of(module: Any) -> Any:
    """The configuration object that the module keeps, the part for text of one that has several; None without."""
    for name in CONFIGURATION:
        found = getattr(module, name, None)
        if found is not None and any(_number(found, n) is not None for n in HEADS):
            return found
        text = getattr(found, "text_config", None)
        if text is not None:
            return text
    return None


def _sources(module: Any, root: Any) -> Iterator[Any]:
    yield module
    for holder in (module, root):
        found = configuration_of(holder)
        if found is not None:
            yield found


def _first(sources: list[Any], names: tuple[str, ...]) -> int | None:
    for source in sources:
        for name in names:
            number = _number(source, name)
            if number is not None:
                return number
    return None


def _number(source: Any, name: str) -> int | None:
    found = source.get(name) if isinstance(source, dict) else getattr(source, name, None)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None
