"""Several optimizers as one: groups, steps, states by names."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import DTensor, load, save
from hp_optim.chain.chained_optimizer import ChainedOptimizer
from hp_platform import DeviceMesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from chain_models import give_gradients, make_model, momentum, parameters, shard, snapshot, train, two


def made(world: World, *, flatten: bool = False, steps: int = 0, without: tuple[str, ...] = ()) -> Any:
    """A chain of two optimizers over a sharded model, after some steps."""
    model = shard(world, make_model(world))
    chain = ChainedOptimizer(model, two(world, model), flatten)
    for step in range(steps):
        train(world, chain, step, without)
    return chain


def wholes(world: World, chain: Any) -> dict[str, Any]:
    """All parameters, whole."""
    named = parameters(world, chain.model)
    return {
        n: world.platform.detach(p.full_tensor() if isinstance(p, DTensor) else p) for n, p in named.items()
    }


@distributed(world_size=1)
def test_groups_settings_and_state_are_those_of_the_optimizers(world: World) -> None:
    chain = made(world)
    first, second = chain
    assert list(chain.optimizers_dict) == ["rest", "matrices"] and len(chain) == 2
    assert chain.defaults is first.defaults
    assert chain.param_groups == [*first.param_groups, *second.param_groups]
    chain.param_groups[1]["lr"] = 0.125
    assert second.param_groups[0]["lr"] == 0.125
    chain.param_groups = [{**group, "lr": 3.0} for group in chain.param_groups]
    assert (first.param_groups[0]["lr"], second.param_groups[0]["lr"]) == (3.0, 3.0)
    assert len(chain.state) == 0
    train(world, chain, 0)
    named = parameters(world, chain.model)
    assert {id(p) for p in chain.state} == {id(p) for p in named.values()}
    matrix = named["layers.0.up.weight"]
    assert chain.state[matrix] is second.state[matrix]
    del chain.state[matrix]
    assert matrix not in second.state and matrix not in chain.state
    chain.state[matrix] = {"velocity": 1}
    assert second.state[matrix] == {"velocity": 1} and len(first.state) + len(second.state) == len(
        chain.state
    )
    assert "ChainedOptimizer of" in repr(chain) and "Momentum" in repr(chain)


@distributed(world_size=1)
def test_one_optimizer_can_be_taken_and_given_parameters(world: World) -> None:
    model = make_model(world)
    named = parameters(world, model)
    alone = momentum([named["norm.weight"]])
    chain = ChainedOptimizer(model, {"alone": alone})
    assert chain.optimizer is alone
    chain.add_param_group({"params": [named["scale"]], "lr": 0.0})
    assert len(chain.param_groups) == 2
    assert chain.state_dict()["param_groups"][1]["params"] == ["scale"]


@distributed(world_size=1)
def test_a_step_is_one_of_each_and_calls_the_closure_once_with_recording_on(world: World) -> None:
    chain = made(world)
    give_gradients(world, chain.model, 0)
    calls = []

    def closure() -> str:
        assert world.platform.is_grad_enabled()
        calls.append(1)
        return "loss"

    assert chain.step(closure) == "loss"
    assert calls == [1]
    assert [group["step"] for group in chain.param_groups] == [1, 1]
    chain.zero_grad(set_to_none=False)
    gradient = parameters(world, chain.model)["norm.weight"].grad
    assert_parity(gradient.full_tensor() * 1.0, gradient.full_tensor() * 0.0, exact=True)
    chain.zero_grad()
    assert all(p.grad is None for p in parameters(world, chain.model).values())


@distributed(world_size=1)
def test_an_empty_chain_does_nothing(world: World) -> None:
    chain = ChainedOptimizer(make_model(world), {})
    assert (chain.step(), chain.param_groups, chain.defaults, dict(chain.state)) == (None, [], {}, {})
    chain.zero_grad()
    assert chain.step(lambda: 3) == 3
    assert chain.state_dict() == {"state": {}, "param_groups": []}
    chain.load_state_dict({"state": {}, "param_groups": []})


@pytest.mark.parametrize("flatten", [False, True])
@distributed(world_size=(1, 2, 3))
def test_reading_the_state_changes_nothing_and_copies_nothing(world: World, flatten: bool) -> None:
    without = ("layers.1.experts", "norm.weight")
    chain = made(world, flatten=flatten, steps=2, without=without)
    give_gradients(world, chain.model, 2, without)
    before = snapshot(chain)
    with count_collectives() as counted:
        read = chain.state_dict()
    counted.assert_counts()
    assert snapshot(chain) == before
    named = parameters(world, chain.model)
    for name, parameter in named.items():
        if flatten:
            value = read.get(f"state.{name}.velocity")
            assert read[f"param_groups.{name}.step"] == 2
        else:
            value = read["state"].get(name, {}).get("velocity")
        assert (value is None) is (name in without)
        if value is not None:
            assert value is chain.state[parameter]["velocity"]
            assert value.placements == parameter.placements
    if not flatten:
        assert [group["step"] for group in read["param_groups"]] == [2, 2]
        assert sorted(n for group in read["param_groups"] for n in group["params"]) == sorted(named)
        assert all("param_names" not in group for group in read["param_groups"])


@pytest.mark.parametrize("flatten", [False, True])
@distributed(world_size=(1, 2))
def test_a_chain_goes_on_bit_by_bit_from_the_state_of_another(world: World, flatten: bool) -> None:
    without = ("layers.1.experts", "norm.weight")
    chain = made(world, flatten=flatten, steps=2, without=without)
    chain.param_groups[0]["lr"] = 0.0625
    fresh, used = made(world, flatten=True), made(world, steps=1)
    for other in (fresh, used):
        with count_collectives() as counted:
            other.load_state_dict(chain.state_dict())
        counted.assert_counts()
        assert parameters(world, other.model)["norm.weight"] not in other.state
        assert [group["lr"] for group in other.param_groups] == [0.0625, 0.5]
        assert [group["step"] for group in other.param_groups] == [2, 2]
        mine, theirs = (parameters(world, c.model) for c in (other, chain))
        for name, parameter in mine.items():
            world.platform.copy_(parameter.to_local(), world.platform.detach(theirs[name].to_local()))
    for step in (2, 3):
        for each in (chain, fresh, used):
            train(world, each, step)
    for each in (fresh, used):
        assert_parity(wholes(world, each), wholes(world, chain), exact=True)


@pytest.mark.parametrize("flatten", [False, True])
@distributed(world_size=4, timeout=120)
def test_checkpoints_go_from_any_number_of_ranks_to_any_other_bit_by_bit(
    world: World, flatten: bool, tmp_path: Path
) -> None:
    """Saved by all, read by some of them, saved by those, read by all again; compared whole, and piece by piece."""
    without = ("norm.weight", "layers.0.experts")
    chain = made(world, flatten=flatten, steps=2, without=without)
    save({"optimizer": chain.state_dict()}, tmp_path / "all")
    expected = whole_state(world, chain)
    if not flatten:
        assert_parity(load(tmp_path / "all")["optimizer"]["state"], expected, exact=True)
    for size in range(1, world.size):
        mesh = DeviceMesh(world.device_type, list(range(size)), mesh_dim_names=("dp",))
        written: dict[str, Any] = {}
        if world.rank < size:
            model = shard(world, make_model(world), mesh)
            part = ChainedOptimizer(model, two(world, model), flatten)
            part.load_state_dict(load(tmp_path / "all", like=part.like)["optimizer"])
            assert_parity(whole_state(world, part), expected, exact=True)
            assert [group["step"] for group in part.param_groups] == [2, 2]
            written = part.state_dict()
        save({"optimizer": written}, tmp_path / str(size))
        again = made(world, flatten=flatten)
        again.load_state_dict(load(tmp_path / str(size), like=again.like)["optimizer"])
        assert_parity(whole_state(world, again), expected, exact=True)
        for name, entry in local_state(world, chain).items():
            assert_parity(local_state(world, again)[name], entry, exact=True)


def whole_state(world: World, chain: Any) -> dict[str, Any]:
    """Name -> key -> whole tensor."""
    named = {n: p for n, p in parameters(world, chain.model).items() if p in chain.state}
    return {
        n: {k: world.platform.detach(v.full_tensor()) for k, v in chain.state[p].items()}
        for n, p in named.items()
    }


def local_state(world: World, chain: Any) -> dict[str, Any]:
    named = {n: p for n, p in parameters(world, chain.model).items() if p in chain.state}
    return {n: {k: v.to_local() for k, v in chain.state[p].items()} for n, p in named.items()}


@distributed(world_size=1)
def test_groups_that_are_cut_otherwise_take_flat_states(world: World) -> None:
    chain = made(world, flatten=True, steps=1)
    named = parameters(world, chain.model)
    groups = [{"params": [p]} for p in named.values()]
    other = ChainedOptimizer(chain.model, {"all": momentum(groups)})
    other.load_state_dict(chain.state_dict())
    assert {group["lr"] for group in other.param_groups} == {0.25, 0.5}
    assert len(other.state) == len(named)
    joined = ChainedOptimizer(chain.model, {"all": momentum(named.values())})
    with pytest.raises(
        ValueError, match=r"are in one group of the optimizer, and have lr 0\.\d+ and 0\.\d+ in"
    ):
        joined.load_state_dict(chain.state_dict())


@distributed(world_size=1)
def test_the_count_of_steps_becomes_the_same_in_all_groups(world: World) -> None:
    chain = made(world, steps=2)
    state = chain.state_dict()
    state["param_groups"][0]["step"] = 0
    chain.load_state_dict(state)
    assert [group["step"] for group in chain.param_groups] == [2, 2]
    state["param_groups"][0]["step"] = 5
    before = snapshot(chain)
    with pytest.raises(
        ValueError, match=r"have made different numbers of steps: \[2, 5\]; optimizers of a chain"
    ):
        chain.load_state_dict(state)
    assert snapshot(chain) == before


@distributed(world_size=1)
def test_a_copy_has_a_model_and_optimizers_of_its_own(world: World) -> None:
    model = make_model(world)
    chain = ChainedOptimizer(model, two(world, model))
    train(world, chain, 0)
    other = copy.deepcopy(chain)
    train(world, other, 1)
    assert other.model is not model
    assert [group["step"] for group in chain.param_groups] == [1, 1]
    assert [group["step"] for group in other.param_groups] == [2, 2]
    assert set(other.state_dict()["state"]) == set(chain.state_dict()["state"])
