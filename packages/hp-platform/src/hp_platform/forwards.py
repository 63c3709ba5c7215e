"""Which modules have a forward: only those are called, so that only there something can be done around the call."""

from __future__ import annotations

from typing import Any

from hp_platform.platform import Platform

_OF_LISTS, _OF_DICTS = ("__len__", "append", "extend"), ("__len__", "items", "update")


def has_forward(platform: Platform, module: Any) -> bool:
    """Whether the module, or its class, has a forward of its own, and not only that of all modules, which raises."""
    forward = getattr(module, "forward", None)
    return getattr(forward, "__func__", forward) is not getattr(platform.Module, "forward", None)


def is_container(platform: Platform, module: Any) -> bool:
    """Whether it is a list or dict of modules or parameters without a forward. Other modules may have methods in its place, and a length."""
    kind = type(module)
    return not has_forward(platform, module) and any(
        all(hasattr(kind, name) for name in names) for names in (_OF_LISTS, _OF_DICTS)
    )


def check_forward(platform: Platform, module: Any, where: str) -> None:
    """ValueError for a module without a forward; ``where``: the function that was called with it."""
    if not has_forward(platform, module):
        raise ValueError(
            f"{where}: a {type(module).__name__} has no forward, so nothing would happen when its modules run: call {where} on each of its "
            "modules, or on the module that it hangs in"
        )
