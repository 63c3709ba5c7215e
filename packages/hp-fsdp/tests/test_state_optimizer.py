"""State of any optimizer with param_groups and state, by the names of parameters. torch's own stand in torch_only."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import DTensor, Replicate, Shard, StridedShard, distribute_tensor, load, save
from hp_fsdp import (
    StateDictOptions,
    get_optimizer_state_dict,
    like_parameters,
    set_optimizer_state_dict,
)
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import Maker
from momentum_states import FROM_0, FULL, Momentum, params, train, trained


def weights(world: World, model: Any) -> list[Any]:
    return [world.platform.detach(p.to_local()) for p in params(world, model)]


def copy_weights(world: World, source: Any, target: Any) -> None:
    for theirs, mine in zip(params(world, source), params(world, target), strict=True):
        world.platform.copy_(mine.to_local(), world.platform.detach(theirs.to_local()))


@pytest.mark.parametrize("name", ["tied", "branches", "scalars", "uneven", "frozen"])
@distributed(world_size=(1, 3))
def test_state_goes_out_and_in_and_training_goes_on_bit_by_bit(world: World, name: str) -> None:
    platform = world.platform
    model, optimizer = trained(world, name)
    entries = len(optimizer.state)
    with count_collectives() as counted:
        shards = get_optimizer_state_dict(model, optimizer)
    counted.assert_counts()
    whole = get_optimizer_state_dict(model, optimizer, options=FULL)
    assert len(optimizer.state) == entries
    names = [n for n, p in platform.named_parameters(model) if p in optimizer.state]
    assert list(shards["state"]) == list(whole["state"]) == names
    for state in (shards, whole):
        assert state["param_groups"] == [
            {"params": [n for n, _ in platform.named_parameters(model)], "lr": 0.1, "mu": 0.5}
        ]
        for entry in state["state"].values():
            assert list(entry) == ["velocity", "step", "calls"]
            assert entry["calls"] == 2 and float(platform.to_numpy(entry["step"])) == 2
            assert isinstance(entry["velocity"], DTensor) is (state is shards)
    given = {
        "whole": whole,
        "whole, used": whole,
        "rank 0": whole if world.rank == 0 else {},
        "shards": shards,
    }
    again = []
    for kind, state in given.items():
        other, fresh = trained(world, name, num_steps=1 if kind == "whole, used" else 0)
        fresh.param_groups[0]["lr"] = 5.0
        options = FROM_0 if kind == "rank 0" else None
        with count_collectives() as counted:
            assert set_optimizer_state_dict(other, fresh, state, options=options) == ([], [])
        if options and world.size > 1:
            counted.assert_counts(broadcast=2 + 2 * len(names), all_gather=1)
        else:
            counted.assert_counts()
        copy_weights(world, model, other)
        again.append((other, fresh))
    for step in (2, 3):
        for each, its in ((model, optimizer), *again):
            train(world, name, each, its, step)
    for other, _ in again:
        assert_parity(weights(world, other), weights(world, model), exact=True)


LAYOUTS = [(StridedShard(0, 2), Shard(0)), (Shard(1), Shard(0)), (Replicate(), Shard(1))]


@pytest.mark.parametrize("placements", LAYOUTS)
@distributed(world_size=4, backends=("torch", "cuda"))
def test_state_lies_as_the_parameter_whatever_its_placements(world: World, placements: Any) -> None:
    platform = world.platform
    mesh = init_device_mesh(world.device_type, (2, 2))
    for rows in (1, 2, 3, 5, 17):
        maker = Maker(world)
        module = maker.linear(rows, 3)
        whole = {
            "velocity": maker.parameter(rows, 3),
            "step": maker.parameter(),
            "row": maker.parameter(rows),
        }
        whole = {key: platform.detach(x) for key, x in whole.items()}
        parameter = platform.parameter(distribute_tensor(platform.detach(module.weight), mesh, placements))
        platform.set_parameter(module, "weight", parameter)
        optimizer = Momentum([parameter])
        given = {"state": {"weight": whole}, "param_groups": [{"params": ["weight"], "mu": 0.25}]}
        set_optimizer_state_dict(module, optimizer, given)
        entry = optimizer.state[parameter]
        assert entry["velocity"].placements == parameter.placements
        assert entry["row"].placements == (Replicate(), Replicate())
        assert not isinstance(entry["step"], DTensor)
        assert optimizer.param_groups[0] == {"params": [parameter], "lr": 0.1, "mu": 0.25}
        found = get_optimizer_state_dict(module, optimizer, options=FULL)
        assert_parity(found["state"]["weight"], whole, exact=True)


@pytest.mark.parametrize("name", ["tied", "scalars", "uneven"])
@distributed(world_size=(1, 2))
def test_a_fresh_optimizer_reads_its_pieces_of_a_checkpoint(world: World, name: str, tmp_path: Path) -> None:
    model, optimizer = trained(world, name)
    save({"run": [get_optimizer_state_dict(model, optimizer), 3]}, tmp_path)
    other, fresh = trained(world, name, num_steps=0)
    with count_collectives() as counted:
        state, number = load(tmp_path, like=like_parameters(other))["run"]
        assert set_optimizer_state_dict(other, fresh, state) == ([], [])
    counted.assert_counts()
    assert number == 3
    for parameter, entry in fresh.state.items():
        assert entry["velocity"].placements == parameter.placements
        assert not isinstance(entry["step"], DTensor) and entry["calls"] == 2
    assert_parity(
        get_optimizer_state_dict(other, fresh, options=FULL)["state"],
        get_optimizer_state_dict(model, optimizer, options=FULL)["state"],
        exact=True,
    )


@distributed(world_size=1)
def test_hyperparameters_that_no_file_holds_stay_and_nested_ones_are_kept(world: World) -> None:
    model, optimizer = trained(world, "mlp")
    names = [name for name, _ in world.platform.named_parameters(model)]
    own = {
        "scale": len,
        "dtype": world.platform.dtype("bfloat16"),
        "rows": {"head.*": [2, 1]},
        "sets": ((1.0, 2.0),),
    }
    optimizer.param_groups[0].update(own, param_names=names)
    state = get_optimizer_state_dict(model, optimizer)
    assert state["param_groups"] == [
        {"params": names, "lr": 0.1, "mu": 0.5, "dtype": "bfloat16", "rows": own["rows"], "sets": own["sets"]}
    ]
    fresh = Momentum(params(world, model))
    fresh.param_groups[0].update(scale=max, param_names=["mine"])
    set_optimizer_state_dict(model, fresh, state)
    (group,) = fresh.param_groups
    assert (group["scale"], group["param_names"], group["dtype"]) == (max, ["mine"], "bfloat16")
    assert group["rows"] == own["rows"] and group["rows"] is not state["param_groups"][0]["rows"]


@distributed(world_size=1)
def test_steps_are_counted_on_the_host_unless_the_optimizer_runs_on_the_device(world: World) -> None:
    model, optimizer = trained(world, "mlp")
    state = get_optimizer_state_dict(model, optimizer, options=FULL)
    for how, device in (({}, "cpu"), ({"capturable": True}, world.device), ({"fused": True}, world.device)):
        fresh = Momentum(params(world, model))
        fresh.param_groups[0].update(how)
        set_optimizer_state_dict(model, fresh, state)
        assert {world.platform.device_of(entry["step"]) for entry in fresh.state.values()} == {device}


@distributed(world_size=2)
def test_groups_are_matched_by_names_and_several_optimizers_are_one(world: World) -> None:
    model, optimizer = trained(world, "mlp")
    ps = params(world, model)
    optimizer.param_groups = [
        {"params": ps[:3], "lr": 1.0, "fused": True},
        {"params": ps[3:], "lr": 2.0, "initial_lr": 4.0},
    ]
    state = get_optimizer_state_dict(model, optimizer, options=FULL)
    first, second = Momentum(ps[5:], ps[:3], lr=9.0), Momentum(ps[3:5], lr=9.0)
    first.param_groups[1]["fused"] = False
    assert set_optimizer_state_dict(model, [first, second], state) == ([], [])
    assert [g["lr"] for g in first.param_groups + second.param_groups] == [2.0, 1.0, 2.0]
    assert [g.get("initial_lr") for g in first.param_groups + second.param_groups] == [4.0, None, 4.0]
    assert first.param_groups[1]["fused"] is False  # how it runs is not what it computes
    assert set(first.state) == {*ps[5:], *ps[:3]} and set(second.state) == set(ps[3:5])
    joined = get_optimizer_state_dict(model, [first, second], options=FULL)
    assert_parity({n: joined["state"][n] for n in state["state"]}, state["state"], exact=True)


@distributed(world_size=2)
def test_what_has_no_state_in_the_dict_has_none_after_loading(world: World) -> None:
    model, optimizer = trained(world, "mlp")
    state = get_optimizer_state_dict(model, optimizer, options=FULL)
    del state["state"]["head.bias"]
    set_optimizer_state_dict(model, optimizer, state)
    assert model.head.bias not in optimizer.state and model.head.weight in optimizer.state
    options = StateDictOptions(True, True, ignore_frozen_params=True)
    model.head.weight.requires_grad = False
    state = get_optimizer_state_dict(model, optimizer, options=options)
    if world.rank == 0:
        assert "head.weight" not in state["state"] and "head.weight" not in state["param_groups"][0]["params"]
        velocity = state["state"]["blocks.0.inner.weight"]["velocity"]
        assert world.platform.device_of(velocity) == "cpu"
    else:
        assert state == {}
    ignoring = StateDictOptions(True, ignore_frozen_params=True, broadcast_from_rank0=True)
    assert set_optimizer_state_dict(model, optimizer, state, options=ignoring) == ([], [])
    assert model.head.weight in optimizer.state


@distributed(world_size=(1, 2))
def test_options_that_are_functions_stay(world: World) -> None:
    model, optimizer = trained(world, "uneven")
    optimizer.param_groups[0]["rule"] = None
    whole = get_optimizer_state_dict(model, optimizer, options=FULL)
    assert whole["param_groups"][0]["rule"] is None
    other, fresh = trained(world, "uneven", num_steps=0)
    fresh.param_groups[0].update(rule=len, mu=0.25)
    for state, options in ((whole, None), (whole if world.rank == 0 else {}, FROM_0)):
        set_optimizer_state_dict(other, fresh, state, options=options)
        assert fresh.param_groups[0]["rule"] is len
        assert fresh.param_groups[0]["mu"] == 0.5
    assert "rule" not in get_optimizer_state_dict(other, fresh)["param_groups"][0]
