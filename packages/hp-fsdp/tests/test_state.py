"""Values go in and out of a sharded model, whole and as shards, under the names that it had before."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DTensor, Replicate, Shard
from hp_fsdp import (
    MixedPrecisionPolicy,
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import PROGRAMS, Maker, loss_of, make_mesh

FULL = StateDictOptions(full_state_dict=True)


def values(world: World, model: Any) -> dict[str, Any]:
    """All parameters of an unsharded model, tied ones under all of their names."""
    named = world.platform.named_parameters(model, remove_duplicate=False)
    return {name: world.platform.to_numpy(world.platform.detach(p)) for name, p in named}


def shifted(world: World, state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: world.platform.tensor(np.asarray(x) + 1, Maker(world).dtype, world.device)
        for name, x in state.items()
    }


@pytest.mark.parametrize("name", ["mlp", "tied", "scalars", "uneven"])
@distributed(world_size=(1, 3))
def test_a_full_state_dict_is_that_of_the_unsharded_model(world: World, name: str) -> None:
    program = PROGRAMS[name]
    expected = values(world, program.build(Maker(world)))
    model = program.shard(
        program.build(Maker(world)), make_mesh(world), mp_policy=MixedPrecisionPolicy(param_dtype="float16")
    )
    state = get_model_state_dict(model, options=FULL)
    assert list(state) == list(expected)
    assert_parity(state, expected, exact=True)


@distributed(world_size=2)
def test_only_rank_0_gets_a_full_state_dict_on_the_cpu(world: World) -> None:
    program = PROGRAMS["mlp"]
    expected = values(world, program.build(Maker(world)))
    model = program.shard(program.build(Maker(world)), make_mesh(world))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with count_collectives() as counted:
        state = get_model_state_dict(model, options=options)
    counted.assert_counts(all_gather=3)
    if world.rank:
        assert state == {}
        return
    assert_parity(state, expected, exact=True)
    assert {world.platform.device_of(x) for x in state.values()} == {"cpu"}


@pytest.mark.parametrize("name", ["mlp", "tied", "scalars", "uneven"])
@distributed(world_size=3)
def test_a_sharded_state_dict_holds_dtensors_over_the_shards_themselves(world: World, name: str) -> None:
    program, platform = PROGRAMS[name], world.platform
    expected = values(world, program.build(Maker(world)))
    model = program.shard(program.build(Maker(world)), make_mesh(world))
    with count_collectives() as counted:
        state = get_model_state_dict(model)
    counted.assert_counts()
    assert list(state) == list(expected)
    shards = dict(platform.named_parameters(model, remove_duplicate=False))
    for key, value in state.items():
        assert isinstance(value, DTensor)
        assert value.placements == ((Shard(0),) if expected[key].ndim else (Replicate(),))
        if np.prod(tuple(shards[key].to_local().shape)):
            assert platform.data_ptr(value.to_local()) == platform.data_ptr(shards[key].to_local())
    assert_parity(state, expected, exact=True)


@pytest.mark.parametrize("kind", ["full", "sharded", "local"])
@pytest.mark.parametrize("name", ["mlp", "tied", "scalars", "uneven"])
@distributed(world_size=(1, 3))
def test_what_was_written_is_read_and_computed_with(world: World, name: str, kind: str) -> None:
    program, platform = PROGRAMS[name], world.platform
    new = shifted(world, values(world, program.build(Maker(world))))
    model = program.shard(program.build(Maker(world)), make_mesh(world))
    source = program.shard(program.build(Maker(world)), make_mesh(world))
    assert set_model_state_dict(source, new) == ([], [])
    given = {
        "full": lambda: new,
        "sharded": lambda: get_model_state_dict(source),
        "local": lambda: dict(platform.state_dict(source)),
    }[kind]()
    assert model.load_state_dict(given) == ([], [])
    assert_parity(get_model_state_dict(model, options=FULL), new, exact=True)
    reference = program.build(Maker(world))
    for key, parameter in platform.named_parameters(reference):
        platform.copy_(parameter, new[key])
    inputs = program.inputs(Maker(world), 0, 0)
    assert_parity(model(inputs), reference(inputs), exact=True)


@distributed(world_size=4, backends="torch")
def test_a_mesh_with_replicas_stands_in_the_dtensors(world: World) -> None:
    program = PROGRAMS["mlp"]
    model = program.shard(program.build(Maker(world)), make_mesh(world, replicas=2))
    state = get_model_state_dict(model)
    assert {x.placements for x in state.values()} == {(Replicate(), Shard(0))}
    assert_parity(state, values(world, program.build(Maker(world))), exact=True)


@distributed(world_size=2)
def test_buffers_are_in_the_state_dict_as_they_are(world: World) -> None:
    program, platform = PROGRAMS["mlp"], world.platform
    model = program.build(Maker(world))
    platform.register_buffer(model, "count", platform.tensor([3, 4], "int64", world.device))
    program.shard(model, make_mesh(world))
    for options in (None, FULL):
        state = get_model_state_dict(model, options=options)
        assert_parity(state["count"], np.array([3, 4]), exact=True)
    new = {**state, "count": platform.tensor([5, 6], "int64", world.device)}
    set_model_state_dict(model, new)
    assert_parity(dict(platform.named_buffers(model))["count"], np.array([5, 6]), exact=True)


@distributed(world_size=2)
def test_a_state_dict_between_forward_and_backward_disturbs_neither(world: World) -> None:
    program, platform = PROGRAMS["mlp"], world.platform
    gradients = []
    for look in (False, True):
        model = program.shard(program.build(Maker(world)), make_mesh(world))
        loss = loss_of(platform, model(program.inputs(Maker(world), world.rank, 0)))
        if look:
            get_model_state_dict(model, options=FULL)
        platform.backward([loss])
        gradients.append({n: platform.get_grad(p) for n, p in platform.named_parameters(model)})
    assert_parity(gradients[1], gradients[0], exact=True)


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
        match=r"'head\.bias' has shape \(3,\), its shard on rank . of 2 \(.,\); the given value has",
    ):
        set_model_state_dict(
            model,
            {"blocks.0.inner.bias": state["blocks.0.inner.bias"] + 1, "head.bias": wrong},
            options=StateDictOptions(strict=False),
        )
    assert_parity(get_model_state_dict(model, options=FULL), before, exact=True)
    with pytest.raises(ValueError, match=r"options must be a hp_fsdp\.StateDictOptions, got dict"):
        get_model_state_dict(model, options={"full_state_dict": True})
