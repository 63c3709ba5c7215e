"""Names, options and values that do not fit a model are refused before anything is written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hp_dtensor import Shard, distribute_tensor
from hp_fsdp import (
    StateDictOptions,
    fully_shard,
    get_model_state_dict,
    set_model_state_dict,
)
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import PROGRAMS, Maker, make_mesh

FULL = StateDictOptions(full_state_dict=True)


@distributed(world_size=2)
def test_names_that_do_not_fit_are_refused_or_returned(world: World) -> None:
    program = PROGRAMS["mlp"]
    model = program.shard(program.build(Maker(world)), make_mesh(world))
    state = get_model_state_dict(model, options=FULL)
    before = {name: world.platform.to_numpy(x) for name, x in state.items()}
    state["surplus"] = state.pop("head.bias")
    message = r"does not fit .*: missing head\.bias; unexpected surplus; rename them, or pass StateDictOptions\(strict=False\)"
    with pytest.raises(RuntimeError, match=message):
        set_model_state_dict(model, state)
    assert model.load_state_dict(state, strict=False) == (["head.bias"], ["surplus"])
    wrong = world.platform.zeros((7, 7), Maker(world).dtype, world.device)
    with pytest.raises(
        ValueError,
        match=r"'head\.bias' has shape \(3,\), its shard on rank . \(.,\); the given value has",
    ):
        set_model_state_dict(
            model,
            {"blocks.0.inner.bias": state["blocks.0.inner.bias"] + 1, "head.bias": wrong},
            options=StateDictOptions(strict=False),
        )
    assert_parity(get_model_state_dict(model, options=FULL), before, exact=True)


BAD_OPTIONS = {
    "no options": (
        lambda: get_model_state_dict(None, options={"full_state_dict": True}),
        r"options must be a hp_fsdp\.StateDictOptions, got dict",
    ),
    "no bool": (
        lambda: StateDictOptions(strict="yes"),
        r"StateDictOptions\.strict must be True or False, got 'yes'",
    ),
    "broadcast of shards": (
        lambda: StateDictOptions(broadcast_from_rank0=True),
        r"broadcast_from_rank0=True sends whole tensors: give full_state_dict=True as well",
    ),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
@distributed(world_size=1)
def test_wrong_options_are_refused(world: World, name: str) -> None:
    call, message = BAD_OPTIONS[name]
    with pytest.raises(ValueError, match=message):
        call()


@distributed(world_size=2)
def test_wrong_values_are_refused_before_anything_is_written(world: World) -> None:
    program, platform = PROGRAMS["mlp"], world.platform
    model = program.build(Maker(world))
    platform.register_buffer(model, "count", platform.tensor([3, 4], "int64", world.device))
    program.shard(model, make_mesh(world))
    state = get_model_state_dict(model, options=FULL)
    before = {name: platform.to_numpy(x) for name, x in state.items()}
    name, first = "head.bias", "blocks.0.inner.bias"
    cases = {
        r"a state dict is a mapping from names to tensors, got list": [("head.bias", 1)],
        r"the value of 'head\.bias' must be a tensor, got list": {**state, name: [1.0, 2.0, 3.0]},
        r"'count' has shape \(2,\), the given value \(3,\): give it in this shape": {
            **state,
            "count": platform.tensor([1, 2, 3], "int64", world.device),
        },
        r"'head\.bias' has shape \(3,\), its shard on rank \d \(\d,\); the given value has \(5,\)": {
            **state,
            name: state[first],
        },
        r"'head\.bias' has shape \(3,\), .* the given value has \(5,\), which is neither": {
            **state,
            name: get_model_state_dict(model)[first],
        },
    }
    for message, wrong in cases.items():
        if isinstance(wrong, dict):
            wrong = {first: state[first] + 1, **{k: v for k, v in wrong.items() if k != first}}
        with pytest.raises(ValueError, match=message):
            set_model_state_dict(model, wrong)
    assert_parity(get_model_state_dict(model, options=FULL), before, exact=True)


@distributed(world_size=4, backends=("torch", "cuda"))
def test_a_dtensor_on_other_ranks_is_refused(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2, 2), mesh_dim_names=("outer", "inner"))
    model, other = Maker(world).linear(5, 3), Maker(world).linear(5, 3)
    fully_shard(model, mesh["inner"])
    fully_shard(other, mesh["outer"])
    with pytest.raises(
        ValueError, match=r"'weight' lies on the ranks of .* bring it there with hp_dtensor\.transfer"
    ):
        set_model_state_dict(model, get_model_state_dict(other))
    # Each row of the mesh is a job of its own: its first rank keeps the values.
    state = get_model_state_dict(model, options=StateDictOptions(True, True))
    assert (state != {}) is (world.rank % 2 == 0)


@distributed(world_size=1)
def test_parameters_without_memory_are_not_loaded(world: World) -> None:
    platform = world.platform
    mesh = init_device_mesh(world.device_type, (1,))
    module = Maker(world).linear(2, 2)
    meta = distribute_tensor(platform.empty((2, 2), "float32", "meta"), mesh, [Shard(0)])
    platform.set_parameter(module, "weight", platform.parameter(meta))
    with pytest.raises(RuntimeError, match=r"'weight' is on the meta device and has no memory to load into"):
        set_model_state_dict(
            module,
            {"weight": platform.zeros((2, 2), "float32", world.device)},
            options=StateDictOptions(strict=False),
        )
