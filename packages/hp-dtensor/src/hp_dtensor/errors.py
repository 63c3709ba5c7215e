"""How messages show functions and DTensors, and the refusal of an operation without a rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor.running_module import running_module
from hp_dtensor.spec import Spec
from hp_platform import get_platform


def name_of(function: Any) -> str:
    """The name of a framework's function, for messages: as users write it."""
    name = getattr(function, "__name__", None)
    if issubclass(get_platform().Tensor, getattr(function, "__objclass__", ())):
        # A class below the one that users know defines it.
        return f"{get_platform().Tensor.__name__}.{name}"
    if getattr(function, "__qualname__", "").startswith("_") and getattr(function, "__module__", None):
        return f"{function.__module__}.{name}"
    names = (getattr(function, attribute, None) for attribute in ("__qualname__", "__name__", "name"))
    return next((name for name in names if isinstance(name, str)), str(function))


def shown_specs(given: Sequence[Any]) -> str:
    """For messages: the specs among the arguments."""
    flat = [x for arg in given for x in (arg if isinstance(arg, tuple) else (arg,))]
    return ", ".join(repr(x) for x in flat if isinstance(x, Spec)) or "DTensors"


def no_rule(name: str, specs: Sequence[Any]) -> NotImplementedError:
    """The error for an operation of the framework that no rule knows; it never runs on shards instead."""
    platform = get_platform()
    return NotImplementedError(
        f"{platform.platform_type.value} {platform.framework_version}: {name} has no rule for DTensors; got "
        f"{shown_specs(specs)}. Ways out: x.full_tensor() to work on the whole tensor, x.to_local() to work on this rank's "
        f"piece and DTensor.from_local() for the result, or a rule of your own (hp_dtensor.rules.rule){running_module()}"
    )


def refuse_copy_of_view(target: Any, name: str) -> None:
    """ValueError if ``target`` is a copy where the unsharded program has a view: writing into it would be lost."""
    source = getattr(target, "_copy_of_view", None)
    if source is not None:
        raise ValueError(
            f"{name} would write into the result of {source}, which is no view here: pieces had to move for it, so the "
            f"tensor that it was taken from would not change. Write into that one by index (x[...] = value), or clone() the "
            f"result first"
        )
