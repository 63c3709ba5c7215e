"""How what a checkpoint holds shall lie, before anything of it is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hp_dtensor.native import DTensor
from hp_dtensor.states.optimizer_names import STEP
from hp_platform.platform import Platform


def like_named(platform: Platform, named: Mapping[str, Any]) -> Callable[[str, tuple[int, ...]], Any]:
    """For ``hp_dtensor.load(path, like=...)``: as the DTensor among ``named`` whose name is a part of the value's, and its shape.

    Parts of a value's name are joined by ``/``, such as ``optimizer/state/layers.0.weight/exp_avg``. None, a whole tensor on the
    cpu, for all others. Communication: none.
    """
    sharded = {name: parameter for name, parameter in named.items() if isinstance(parameter, DTensor)}

    def like(name: str, shape: tuple[int, ...]) -> Any:
        parts = name.split("/")
        if parts[-1] == STEP:  # a plain number, also beside a parameter that is one
            return None
        for part in parts:
            found = sharded.get(platform.unwrapped_name(part))
            if found is not None and tuple(found.shape) == tuple(shape):
                return found
        return None

    return like
