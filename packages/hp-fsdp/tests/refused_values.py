"""Wrong calls of what reads and writes the values of sharded modules."""

from __future__ import annotations

from typing import Any

from fsdp_models import Maker
from refused_calls import Call, Model, shard, with_sharded

from hp_fsdp import StateDictOptions, full_params, get_model_state_dict, set_model_state_dict
from hp_platform.testing import World


def second_full_params(model: Model) -> None:
    with full_params(model), full_params(model):
        pass


def forward_in_full_params(model: Model) -> None:
    with full_params(model):
        model(None)


def whole_weight(world: World, model: Model) -> Any:
    return world.platform.zeros((9, 4), Maker(world).dtype, world.device)


CALLS: dict[str, Call] = {
    "a state dict without names": with_sharded(
        lambda model: model.load_state_dict({}),
        r"the state dict does not fit HSDPModel: missing blocks\.0\.inner\.weight, .*strict=False",
        RuntimeError,
    ),
    "a state dict with another name": with_sharded(
        lambda model: set_model_state_dict(model, {**get_model_state_dict(model), "tail": 1}),
        r"missing nothing; unexpected tail",
        RuntimeError,
    ),
    "a value of another shape": Call(
        lambda world, model: set_model_state_dict(
            model, {**get_model_state_dict(model), "head.weight": whole_weight(world, model)}
        ),
        r"'head\.weight' has shape \(3, 4\), its shard on rank \d \([12], 4\); the given value has \(9, 4\)",
        before=shard,
    ),
    "no state dict": with_sharded(
        lambda model: set_model_state_dict(model, [1]),
        r"a state dict is a mapping from names to tensors, got list",
    ),
    "options of another kind": with_sharded(
        lambda model: get_model_state_dict(model, options={"full_state_dict": True}),
        r"options must be a hp_fsdp\.StateDictOptions, got dict",
    ),
    "an option by a number": with_sharded(
        lambda model: get_model_state_dict(model, options=StateDictOptions(full_state_dict=1)),  # type: ignore[arg-type]
        r"StateDictOptions\.full_state_dict must be True or False, got 1",
    ),
    "full_params of something else": with_sharded(
        lambda model: full_params({"model": model}).__enter__(),
        r"full_params takes a module of \w+, got dict",
    ),
    "full_params twice": with_sharded(
        second_full_params,
        r"full_params is open already for HSDPModel",
        RuntimeError,
    ),
    "forward in full_params": with_sharded(
        forward_in_full_params,
        r"forward of HSDPModel inside of full_params: units gather by themselves",
        RuntimeError,
    ),
}
