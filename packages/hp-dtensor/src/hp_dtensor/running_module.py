"""Which module was running when an operation failed, found on Python's stack at that moment: nothing is kept before."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from hp_platform import get_platform

_TOLD = frozenset({ValueError, RuntimeError, NotImplementedError, IndexError, TypeError})


def tell_module(error: BaseException) -> None:
    """Add to the error's message in which module it was raised: "...; in Model 'layers.3.mlp' (MLP)". Once per error.

    Errors of other kinds and those without a message stay as they are, and so do all outside of modules.
    """
    if type(error) not in _TOLD or len(error.args) != 1 or not isinstance(error.args[0], str):
        return
    if not hasattr(error, "_in_module"):
        where = running_module()
        error._in_module = where  # type: ignore[attr-defined]
        error.args = (error.args[0] + where,)


def running_module() -> str:
    """``"; in Model 'layers.3.mlp' (MLP)"``: the innermost module whose method runs, in the outermost one that has it.

    Empty where no module runs.
    """
    modules = list(_modules())
    if not modules:
        return ""
    inner = modules[0]
    for outer in reversed(modules):
        for name, module in get_platform().named_modules(outer):
            if module is inner:
                kind = type(inner).__name__
                return f"; in {type(outer).__name__} {name!r} ({kind})" if name else f"; in {kind}"
    return f"; in {type(inner).__name__}"


_CALLS = frozenset({"forward", "construct"})
"""What frameworks run when a module is called; the rest of that way has names that begin with an underscore."""


def running_method() -> str:
    """The quoted name of the innermost method of a module that runs and is not its forward; without one, ``name``."""
    for _, method in _running():
        if method not in _CALLS and not method.startswith("_"):
            return repr(method)
    return "name"


def is_in_forward(module: Any) -> bool:
    """Whether the forward of this very module runs: it then stands on Python's stack, also if an earlier one was left by an
    exception.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _CALLS and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is module:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _modules() -> Iterator[Any]:
    """The modules whose methods are running, innermost first."""
    for module, _ in _running():
        yield module


def _running() -> Iterator[tuple[Any, str]]:
    """Modules and methods of theirs: frames of functions whose first argument is a module ``self``."""
    platform: Any = get_platform()
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            # A cell variable where an inner function or super() uses it: f_locals has it in any case.
            own = frame.f_locals.get("self")
            if platform.is_module(own):
                yield own, code.co_name
        frame = frame.f_back  # type: ignore[assignment]
