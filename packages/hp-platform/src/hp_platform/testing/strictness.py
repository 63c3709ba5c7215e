"""Warnings in workers: pytest's own filters, and errors that nobody sees become errors of the test."""

from __future__ import annotations

import gc
import importlib
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

ACTIONS = ("default", "error", "ignore", "always", "module", "once")


@dataclass(frozen=True)
class Filters:
    """Warning filters as the run's configuration states them, in order; later ones win."""

    patterns: tuple[str, ...] = ()
    """From the ini file and from marks: message and module are regular expressions."""
    literals: tuple[str, ...] = ()
    """From ``-W``: message and module are meant as they stand."""
    marks: tuple[str, ...] = ()
    """From the test's own marks, as patterns."""


@contextmanager
def strict(filters: Filters) -> Iterator[None]:
    """Apply the filters inside, and raise at the end what was raised where no caller could catch it.

    That is in a background thread, in a ``__del__`` or in another callback of the interpreter. RuntimeError from the first
    such exception.
    """
    lost: list[BaseException] = []

    def note_thread(info: threading.ExceptHookArgs) -> None:
        if info.exc_value is not None and not isinstance(info.exc_value, SystemExit):
            lost.append(info.exc_value)

    def note_unraisable(info: Any) -> None:
        if info.exc_value is not None:
            lost.append(info.exc_value)

    before = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = note_thread, note_unraisable
    try:
        with warnings.catch_warnings():
            apply(filters)
            yield
            gc.collect()  # what the test leaves behind complains now, not in the next test
    finally:
        threading.excepthook, sys.unraisablehook = before
    if lost:
        raise RuntimeError(
            f"{len(lost)} exception(s) in background threads or finalizers, where nothing catches them; the first: {lost[0]!r}"
        ) from lost[0]


def apply(filters: Filters) -> None:
    """Make the filters those of this process (inside of ``warnings.catch_warnings``)."""
    for category in (DeprecationWarning, PendingDeprecationWarning):
        warnings.filterwarnings("always", category=category)
    for text in filters.patterns:
        _add(text, escape=False)
    for text in filters.literals:
        _add(text, escape=True)
    for text in filters.marks:
        _add(text, escape=False)


def _add(text: str, *, escape: bool) -> None:
    fields: Sequence[str] = [field.strip() for field in text.split(":")]
    if len(fields) > 5:
        raise ValueError(
            f"warning filter {text!r} has more than five fields: action:message:category:module:lineno"
        )
    action, message, category, module, line = [*fields, "", "", "", ""][:5]
    chosen = next((known for known in ACTIONS if action and known.startswith(action)), None)
    if chosen is None:
        raise ValueError(
            f"warning filter {text!r}: unknown action {action!r}; known ones are {', '.join(ACTIONS)}"
        )
    if escape:
        message, module = re.escape(message), re.escape(module) + r"\Z" if module else ""
    warnings.filterwarnings(chosen, message, _category(category), module, int(line or 0))  # type: ignore[arg-type]


def _category(name: str) -> type[Warning]:
    if not name:
        return Warning
    module, _, kind = name.rpartition(".")
    found: type[Warning] = getattr(importlib.import_module(module or "builtins"), kind)
    return found
