"""How what a checkpoint holds shall lie on a model, before anything of it is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.states.likeness import like_named
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
    return like_named(platform, parameters_by_name(platform, model))
