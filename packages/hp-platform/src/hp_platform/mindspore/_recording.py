"""Whether operations are recorded for backward.

MindSpore records only after ``set_grad_flag(True)``; the flag belongs to the thread, and MindSpore's functional ``grad`` and
``value_and_grad`` leave it off. So every door of this backend through which a model begins (calling a module, asking for a
gradient, applying a Function) turns it on again. ``no_grad`` is a second, independent switch.
"""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import Any

from hp_platform.mindspore._private import executor


def ensure_recording() -> None:
    """Let this thread record."""
    if not executor.grad_flag():
        executor.set_grad_flag(True)


class GradMode(ContextDecorator):
    """Recording on or off inside; a context manager or a decorator, may be nested."""

    def __init__(self, *, record: bool) -> None:
        self._record = record
        self._before: list[bool] = []

    def __enter__(self) -> None:
        if self._record:
            ensure_recording()
        self._before.append(executor.enable_grad())
        executor.set_enable_grad(self._record)

    def __exit__(self, *exc: Any) -> None:
        executor.set_enable_grad(self._before.pop())


def no_grad() -> GradMode:
    """Nothing inside is recorded."""
    return GradMode(record=False)


def enable_grad() -> GradMode:
    """Recording on again."""
    return GradMode(record=True)
