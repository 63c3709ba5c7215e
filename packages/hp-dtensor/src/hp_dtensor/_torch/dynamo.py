"""torch.compile and DTensors: dynamo shall compile nothing of the dispatch, so these are the functions to leave out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def functions_of(cls: type, base: type) -> Iterable[Any]:
    """The functions that ``cls`` and its bases before ``base`` define."""
    for part in cls.__mro__[: cls.__mro__.index(base)]:
        for value in vars(part).values():
            yield from (value.fget, value.fset) if isinstance(value, property) else (value,)
