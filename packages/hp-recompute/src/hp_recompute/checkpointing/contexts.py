"""What ``context_fn`` of a checkpoint gives: a context manager for the first run, and one for every second run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from inspect import GEN_CREATED, getgeneratorstate, isgenerator
from typing import Any

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def contexts_of(context_fn: Callable[[], Contexts] | None) -> Contexts:
    """ValueError for what is no pair of context managers."""
    if context_fn is None:
        return nullcontext(), nullcontext()
    given = context_fn()
    are_two = isinstance(given, (tuple, list)) and len(given) == 2
    if not are_two or not all(isinstance(each, AbstractContextManager) for each in given):
        raise ValueError(
            f"context_fn gives two context managers, for the first and for the second run, got {given!r}: return (nullcontext(), context)"
        )
    return given[0], given[1]


def check_can_be_entered(context: AbstractContextManager[Any], function: str) -> None:
    """RuntimeError for one made by ``contextlib.contextmanager`` that was entered before: it lasts for one second run."""
    generator = getattr(context, "gen", None)
    if isgenerator(generator) and getgeneratorstate(generator) != GEN_CREATED:
        raise RuntimeError(
            f"{function} is computed again another time, and the second context manager of its context_fn can be entered once only: give "
            "one that can be entered again (a class with __enter__ and __exit__), or go backward once"
        )
