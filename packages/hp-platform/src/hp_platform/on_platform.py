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
