"""Values go in and out of a sharded model, whole and as shards, under the names that it had before.

State dicts go by the placements of DTensors alone, so that some models here are made of DTensors by hand, in placements that
this version of fully_shard does not make.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DTensor, Replicate, Shard, StridedShard, distribute_tensor
from hp_fsdp import (
    MixedPrecisionPolicy,
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from hp_platform import init_device_mesh
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
    # One parameter at a time, so that no rank holds more than one beside what it keeps.
    counted.assert_counts(all_gather=len(expected))
    assert counted.nbytes() == sum(x.nbytes for x in expected.values())
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


ROWS = (1, 2, 3, 5, 17)
LAYOUTS = {
    "fsdp of tp": ((2, 2), (StridedShard(0, 2), Shard(0))),
    "outer fsdp": ((2, 2), (Shard(0), Shard(0))),
    "rows and columns": ((2, 2), (Shard(1), Shard(0))),
    "replicas": ((2, 2), (Replicate(), Shard(1))),
    "replicate": ((4,), (Replicate(),)),
    "columns": ((4,), (Shard(1),)),
}


def by_hand(world: World, layout: str) -> tuple[Any, dict[str, Any]]:
    """A module with one DTensor of each number of rows, and their values."""
    shape, placements = LAYOUTS[layout]
    mesh = init_device_mesh(world.device_type, shape)
    maker = Maker(world)
    platform, values = world.platform, {}

    class Module(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            for rows in ROWS:
                whole = maker.parameter(rows, 3)
                values[f"weight{rows}"] = platform.to_numpy(platform.detach(whole))
                dtensor = distribute_tensor(platform.detach(whole), mesh, placements)
                setattr(self, f"weight{rows}", platform.parameter(dtensor))

    return Module(), values


@pytest.mark.parametrize("layout", LAYOUTS)
@distributed(world_size=4, backends=("torch", "cuda"))
def test_every_placement_and_number_of_rows_is_read_and_loaded_exactly(world: World, layout: str) -> None:
    model, expected = by_hand(world, layout)
    assert_parity(get_model_state_dict(model, options=FULL), expected, exact=True)
    new = shifted(world, expected)
    locals_of_new = {
        name: distribute_tensor(new[name], p.device_mesh, p.placements).to_local()
        for name, p in world.platform.named_parameters(model)
    }
    others = [name for name in LAYOUTS if name != layout]
    other = others[list(LAYOUTS).index(layout) % len(others)]
    elsewhere, _ = by_hand(world, other)
    set_model_state_dict(elsewhere, new)
    for given in (new, locals_of_new, get_model_state_dict(elsewhere)):
        model, _ = by_hand(world, layout)
        assert set_model_state_dict(model, given) == ([], [])
        assert_parity(get_model_state_dict(model, options=FULL), new, exact=True)


@distributed(world_size=2)
def test_whole_values_and_copies_on_the_cpu_have_memory_of_their_own(world: World) -> None:
    program, platform = PROGRAMS["scalars"], world.platform
    model = program.build(Maker(world))
    platform.register_buffer(model, "count", platform.tensor([3, 4], "int64", world.device))
    program.shard(model, make_mesh(world))
    before = values(world, program.build(Maker(world)))
    for options in (FULL, StateDictOptions(cpu_offload=True), StateDictOptions(True, True)):
        state = get_model_state_dict(model, options=options)
        for name, x in state.items():
            assert isinstance(x, DTensor) is (name != "count" and not options.full_state_dict)
            if options.cpu_offload:
                assert platform.device_of(x.to_local() if isinstance(x, DTensor) else x) == "cpu"
            platform.fill_(x.to_local() if isinstance(x, DTensor) else x, 9)
    assert_parity(dict(platform.named_buffers(model))["count"], np.array([3, 4]), exact=True)
    after = get_model_state_dict(model, options=FULL)
    assert_parity({name: after[name] for name in before}, before, exact=True)


@distributed(world_size=2)
def test_a_tied_parameter_is_gathered_once_and_loaded_by_any_of_its_names(world: World) -> None:
    program = PROGRAMS["tied"]
    model = program.shard(program.build(Maker(world)), make_mesh(world))
    with count_collectives() as counted:
        state = get_model_state_dict(model, options=FULL)
    counted.assert_counts(all_gather=len(state) - 1)
    assert state["head.weight"] is state["embed.weight"]
    for name in ("head.weight", "embed.weight"):
        new = dict(state)
        new[name] = state[name] + 1
        del new["embed.weight" if name == "head.weight" else "head.weight"]
        assert set_model_state_dict(model, new) == ([], [])
        found = get_model_state_dict(model, options=FULL)
        assert_parity([found["head.weight"], found["embed.weight"]], [new[name]] * 2, exact=True)
    assert model.head.weight is model.embed.weight
    del new["embed.weight"]
    names = set_model_state_dict(model, new, options=StateDictOptions(strict=False))
    assert names.missing_keys == ["embed.weight", "head.weight"]


@distributed(world_size=2)
def test_frozen_parameters_may_be_left_out_and_missing(world: World) -> None:
    program = PROGRAMS["frozen"]
    model = program.shard(program.build(Maker(world)), make_mesh(world))
    trainable = {n for n, p in world.platform.named_parameters(model) if p.requires_grad}
    with count_collectives() as counted:
        state = get_model_state_dict(model, options=StateDictOptions(True, ignore_frozen_params=True))
    assert set(state) == trainable
    assert 0 < len(trainable) < len(get_model_state_dict(model))
    counted.assert_counts(all_gather=len(trainable))
    new = {name: x + 1 for name, x in state.items()}
    assert set_model_state_dict(model, new, options=StateDictOptions(ignore_frozen_params=True)) == ([], [])
    found = get_model_state_dict(model, options=FULL)
    assert_parity({name: found[name] for name in new}, new, exact=True)
    with pytest.raises(RuntimeError, match=r"does not fit HSDPModel: missing block\.outer\.weight"):
        set_model_state_dict(model, new)


@distributed(world_size=2)
def test_values_of_submodules_come_with_or_without_their_prefix(world: World) -> None:
    program = PROGRAMS["mlp"]
    model = program.shard(program.build(Maker(world)), make_mesh(world))
    everything = get_model_state_dict(model, options=FULL)
    with count_collectives() as counted:
        part = get_model_state_dict(model, submodules=[model.blocks[1].inner, model.head], options=FULL)
    counted.assert_counts(all_gather=4)
    names = [f"{module}.{name}" for module in ("blocks.1.inner", "head") for name in ("weight", "bias")]
    assert list(part) == names
    assert_parity(part, {name: everything[name] for name in names}, exact=True)
    options = StateDictOptions(full_state_dict=True, keep_submodule_prefixes=False)
    bare = get_model_state_dict(model, submodules=[model.head], options=options)
    assert_parity(bare, {n: everything[f"head.{n}"] for n in ("weight", "bias")}, exact=True)
    assert get_model_state_dict(model, submodules=[model]).keys() == everything.keys()
    with pytest.raises(ValueError, match=r"with several submodules gives two values one name: give one"):
        get_model_state_dict(model, submodules=[model.head, model.blocks[0].inner], options=options)
    with pytest.raises(ValueError, match=r"submodules\[1\], \w+, is no module in HSDPModel: give modules of"):
        get_model_state_dict(model, submodules=[model.head, Maker(world).linear(2, 2)])


@distributed(world_size=4, backends=("torch", "cuda"))
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
