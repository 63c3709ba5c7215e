"""What can be seen of a module: its own parameters, whether a style knows how to cut it, whether it drops elements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hp_platform import get_platform
from hp_tp.styles.cuts import METHOD

Module = Any

STACKED = ({"gate_up_proj", "down_proj"}, {"gate_proj", "up_proj", "down_proj"}, {"w1", "w2", "w3"})
"""The parameters of experts that are stacked along a first dim, without biases."""


def parameters_of(module: Module) -> dict[str, Any]:
    """The module's own parameters, those that it shares with others, too."""
    return dict(get_platform().named_parameters(module, recurse=False, remove_duplicate=False))


def linear_weight(module: Module) -> Any:
    """The weight ``(out, in)`` of a linear layer; None for other modules. What says itself how it is cut is taken for one."""
    return _weight(module, "linear")


def embedding_weight(module: Module) -> Any:
    """The weight ``(num, dim)`` of an embedding; None for other modules."""
    return _weight(module, "embedding")


def _weight(module: Module, kind: str) -> Any:
    own = get_platform().layer_kind(module)
    if own != kind and not (own is None and callable(getattr(module, METHOD, None))):
        return None
    weight = parameters_of(module).get("weight")
    return weight if weight is not None and len(weight.shape) == 2 else None


def is_stack(module: Module) -> bool:
    """Whether all experts stand in one module, as parameters ``(experts, out, in)``."""
    own = parameters_of(module)
    return set(own) in STACKED and all(len(p.shape) == 3 for p in own.values())


def drops(module: Module, below: Iterable[Module]) -> bool:
    """Whether there is dropout with a probability above 0 in a module: a layer of it below, or an attribute named so."""
    if any("Dropout" in type(inner).__name__ and getattr(inner, "p", 0) for inner in below):
        return True
    return any(
        "drop" in name and isinstance(value, float) and value > 0
        for name, value in vars(module).items()
        if not name.startswith("_")
    )
