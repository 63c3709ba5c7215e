"""Methods of sharded modules that gather and re-shard as forward does."""

from __future__ import annotations

from typing import Any

from hp_fsdp.unit import unit_of


def register_forward_method(module: Any, name: str) -> None:
    """Let ``module.name(...)`` gather and re-shard as ``module(...)`` does: for methods other than forward that compute.

    Called on a module that is not sharded it does nothing. ValueError if there is no such method. No communication.
    """
    method = getattr(module, name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {name!r}")
    unit = unit_of(module)
    if unit is None:
        return
    hooks = unit.hooks

    def sharded_method(*args: Any, **kwargs: Any) -> Any:
        return hooks.run(module, method, args, kwargs)

    object.__setattr__(module, name, sharded_method)
