"""How what a checkpoint holds shall lie on a model, before anything of it is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor import DTensor
from hp_dtensor.states.optimizer_names import STEP
from hp_dtensor.states.values import parameters_by_name
from hp_fsdp.state import show_shards
from hp_platform.platform import get_platform


def like_parameters(model: Any) -> Callable[[str, tuple[int, ...]], Any]:
    """For ``hp_dtensor.load(path, like=like_parameters(model))``: every rank reads the pieces of its own shards, and no more.

    The function that it returns takes a name in the checkpoint, parts joined by ``/`` such as
    ``optimizer/state/layers.0.weight/exp_avg``, and a shape. It gives the sharded parameter of ``model`` whose name is a part of it,
    if that has this shape: the value lies as the parameter, on its device. Otherwise None: a whole tensor, on the cpu of every rank.

    So state is loaded at any number of ranks, also into an optimizer that has not stepped yet, without a whole tensor anywhere::

        state = hp_dtensor.load(path, like=hp_fsdp.like_parameters(model))
        hp_fsdp.set_model_state_dict(model, state["model"])
        hp_fsdp.set_optimizer_state_dict(model, optimizer, state["optimizer"])

    Memory: beside what the model and the optimizer hold, the pieces of the whole checkpoint. Communication: none.
    """
    platform = get_platform()
    show_shards(platform, model)
    named = parameters_by_name(platform, model)
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
