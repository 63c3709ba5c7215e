"""Hooks that users have registered with the framework on the loading of modules: a sharded model runs them, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_dtensor.states.options import IncompatibleKeys
from hp_platform.platform import Platform


def given_to_hooks(
    platform: Platform, model: Any, state_dict: Mapping[Any, Any], names: IncompatibleKeys
) -> dict[str, Any]:
    """The values by names of before compilation, as the hooks of all modules, outer ones first, have renamed and changed them in a copy.

    Each sees the names below its own module, once for every place where that hangs, as in the framework's ``load_state_dict``, and may
    write to the lists of ``names``. RuntimeError with the errors that they report.
    """
    given = {platform.unwrapped_name(str(name)): value for name, value in state_dict.items()}
    of_modules = getattr(state_dict, "_metadata", None) or {}
    # Of a compiled module two have this name: what the compiler put around it comes first, its own is to count.
    metadata = {platform.unwrapped_name(path): found for path, found in of_modules.items()}
    errors: list[str] = []
    for path, module in platform.named_modules(model, remove_duplicate=False):
        before, _ = platform.loading_hooks(module)
        if not before:
            continue
        place = platform.unwrapped_name(path)
        prefix = f"{place}." if place else ""
        own = {name: value for name, value in given.items() if name.startswith(prefix)}
        rest = {name: value for name, value in given.items() if not name.startswith(prefix)}
        for hook in before:
            hook(
                own,
                prefix,
                metadata.get(place, {}),
                True,
                names.missing_keys,
                names.unexpected_keys,
                errors,
            )
        given = {**rest, **own}
    if errors:
        raise RuntimeError(
            f"hooks on the loading of {type(model).__name__} refuse the state dict: {'; '.join(errors)}"
        )
    return given


def has_last_word(platform: Platform, model: Any) -> bool:
    """Whether hooks look at the names when all is written: what they strike off is no error."""
    return any(platform.loading_hooks(module)[1] for _, module in platform.named_modules(model))


def tell_hooks(platform: Platform, model: Any, names: IncompatibleKeys) -> None:
    """All values are there: inner modules are told first. Hooks may write to the lists of names."""
    for module in reversed([module for _, module in platform.named_modules(model, remove_duplicate=False)]):
        _, after = platform.loading_hooks(module)
        for hook in after:
            hook(module, names)
