"""What is made once for the platform of the process, such as autograd Functions, which inherit from the framework's class."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from hp_platform import _process
from hp_platform.platform import get_platform

T = TypeVar("T")


def once(define: Callable[[Any], T]) -> Callable[[], T]:
    """A decorator: ``define(platform)`` runs at the first call, and every call gives what it made.

    The results are kept with the platform in the state of the process. No communication. Example::

        @once
        def _functions(platform):
            class Scale(platform.Function): ...
            return SimpleNamespace(Scale=Scale)

        _functions().Scale.apply(x)
    """

    @wraps(define)
    def found() -> T:
        made = _process.state.made_for_platform
        if define not in made:
            made[define] = define(get_platform())
        return made[define]

    return found


def when_known(prepare: Callable[[Any], None]) -> Callable[[Any], None]:
    """A decorator: ``prepare(platform)`` runs as soon as the platform of the process is known: now, or when it is asked for first.

    For what must have happened before a function is called, and cannot happen within the call: a compiler may be recording it.
    """
    if _process.state.platform is None:
        _process.state.upon_platform.append(prepare)
    else:
        prepare(_process.state.platform)
    return prepare
