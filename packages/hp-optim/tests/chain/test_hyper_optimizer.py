"""``get_hyper_optimizer``: groups chosen or given, arguments with and without prefixes, and states of real optimizers."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import DTensor, load, save
from hp_optim import AdamW, Muon, get_hyper_optimizer
from hp_platform import DeviceMesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from chain_models import give_gradients, make_model, parameters, shard, snapshot

MATRICES = ["up.weight", "experts", "output.weight"]


def names_in(chain: Any, kind: str) -> list[str]:
    named = {id(p): name for name, p in chain.platform.named_parameters(chain.model)}
    groups = chain.optimizers_dict[kind].param_groups
    return sorted(named[id(p)] for group in groups for p in group["params"])


def train(world: World, chain: Any, step: int, without: tuple[str, ...] = ()) -> None:
    give_gradients(world, chain.model, step, without)
    chain.step()
    chain.zero_grad()


def whole_state(world: World, chain: Any) -> dict[str, Any]:
    """Name -> key -> whole tensor or number."""
    found: dict[str, Any] = {}
    for name, parameter in parameters(world, chain.model).items():
        if parameter in chain.state:
            found[name] = {
                key: world.platform.detach(x.full_tensor()) if isinstance(x, DTensor) else x
                for key, x in chain.state[parameter].items()
            }
    return found


def wholes(world: World, chain: Any) -> dict[str, Any]:
    return {n: world.platform.detach(p.full_tensor()) for n, p in parameters(world, chain.model).items()}


@distributed(world_size=(1, 2))
def test_groups_are_chosen_by_the_routing(world: World) -> None:
    chain = get_hyper_optimizer(
        shard(world, make_model(world)),
        muon_kwargs={"muon_lr": 0.5, "momentum": 0.75},
        adamw_kwargs={"adamw_lr": 0.25, "betas": (0.5, 0.75)},
        patterns={"layers.1.output.*": "adamw"},
    )
    assert list(chain.optimizers_dict) == ["adamw", "muon"]
    adamw, muon = chain
    assert isinstance(adamw, AdamW) and isinstance(muon, Muon) and chain.flatten
    muons = sorted(f"layers.{i}.{m}" for i in (0, 1) for m in MATRICES if (i, m) != (1, "output.weight"))
    assert names_in(chain, "muon") == muons == sorted(chain.routing.names("muon"))
    assert names_in(chain, "adamw") == sorted(chain.routing.names("adamw"))
    assert len(muons) + len(names_in(chain, "adamw")) == len(parameters(world, chain.model))
    assert (muon.param_groups[0]["lr"], muon.param_groups[0]["momentum"]) == (0.5, 0.75)
    assert (adamw.param_groups[0]["lr"], adamw.param_groups[0]["betas"]) == (0.25, (0.5, 0.75))
    assert "layers.1.output.weight" in str(chain.routing)


@distributed(world_size=2)
def test_the_first_rank_logs_the_table(world: World) -> None:
    logger, told = logging.getLogger("hp_optim.routing"), io.StringIO()
    handler = logging.StreamHandler(told)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        chain = get_hyper_optimizer(shard(world, make_model(world)))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert (str(chain.routing) in told.getvalue()) is (world.rank == 0)


@distributed(world_size=1)
def test_what_one_list_leaves_goes_to_the_other_optimizer(world: World) -> None:
    model = make_model(world)
    named = parameters(world, model)
    one = named["layers.0.up.weight"]
    chain = get_hyper_optimizer(model, muon_params=[{"params": [one], "lr": 0.125}])
    assert names_in(chain, "muon") == ["layers.0.up.weight"]
    assert chain.optimizers_dict["muon"].param_groups[0]["lr"] == 0.125
    assert len(names_in(chain, "adamw")) == len(named) - 1
    assert chain.optimizers_dict["muon"].param_groups[0]["param_names"] == ["layers.0.up.weight"]
    routes = {route.name: route for route in chain.routing}
    assert (routes["layers.0.up.weight"].why, routes["layers.1.up.weight"].why) == (
        "muon_params",
        "not in muon_params",
    )
    only = get_hyper_optimizer(model, muon_params=[])
    assert list(only.optimizers_dict) == ["adamw"] and not only.flatten
    assert len(names_in(only, "adamw")) == len(named)
    rest = [p for p in named.values() if p is not one]
    mixed = get_hyper_optimizer(model, adamw_params=[("n" + str(i), p) for i, p in enumerate(rest)])
    assert names_in(mixed, "muon") == ["layers.0.up.weight"]
    assert mixed.optimizers_dict["adamw"].param_groups[0]["param_names"][0] == "n0"
    split = {"layers.0.*": {"rows": 2}}
    by_name = get_hyper_optimizer(model, [one], muon_kwargs={"split": split})
    assert by_name.optimizers_dict["muon"].param_groups[0]["split"] == split
    for parameter in rest:
        parameter.requires_grad = False
    frozen = get_hyper_optimizer(model, adamw_params=[])
    assert names_in(frozen, "muon") == ["layers.0.up.weight"]
    assert list(frozen.optimizers_dict) == ["muon"]


@distributed(world_size=1)
def test_two_empty_lists_make_an_empty_chain(world: World) -> None:
    chain = get_hyper_optimizer(make_model(world), [], [])
    assert (len(chain), chain.flatten, chain.step()) == (0, False, None)
    assert {route.why for route in chain.routing} == {"both lists are empty"}


@distributed(world_size=(1, 3), timeout=120)
def test_reading_changes_nothing_and_loading_goes_on_bit_by_bit(world: World) -> None:
    """The given gradients are the same in both chains, so every number must be."""
    without = ("layers.1.experts", "norm.weight")

    def made(steps: int) -> Any:
        chain = get_hyper_optimizer(shard(world, make_model(world)), muon_kwargs={"lr": 0.125})
        for step in range(steps):
            train(world, chain, step, without)
        return chain

    chain, fresh, used = made(2), made(0), made(1)
    give_gradients(world, chain.model, 2, without)
    before = snapshot(chain)
    with count_collectives() as counted:
        read = chain.state_dict()
    counted.assert_counts()
    assert snapshot(chain) == before
    assert not any(key.startswith("state.norm.weight.") for key in read)
    assert "param_groups.norm.weight.lr" in read
    chain.zero_grad()
    for other in (fresh, used):
        other.load_state_dict(chain.state_dict())
        for name, parameter in parameters(world, other.model).items():
            theirs = parameters(world, chain.model)[name]
            world.platform.copy_(parameter.to_local(), world.platform.detach(theirs.to_local()))
    for step in (2, 3):
        for each in (chain, fresh, used):
            train(world, each, step)
    for each in (fresh, used):
        assert_parity(wholes(world, each), wholes(world, chain), exact=True)
        assert_parity(whole_state(world, each), whole_state(world, chain), exact=True)


@distributed(world_size=4, timeout=180)
def test_checkpoints_go_from_any_number_of_ranks_to_any_other_bit_by_bit(
    world: World, tmp_path: Path
) -> None:
    without = ("layers.1.experts", "norm.weight")
    chain = get_hyper_optimizer(shard(world, make_model(world)))
    for step in range(2):
        train(world, chain, step, without)
    save({"optimizer": chain.state_dict()}, tmp_path / "all")
    expected = whole_state(world, chain)
    for size in range(1, world.size):
        mesh = DeviceMesh(world.device_type, list(range(size)), mesh_dim_names=("dp",))
        written: dict[str, Any] = {}
        if world.rank < size:
            part = get_hyper_optimizer(shard(world, make_model(world), mesh))
            part.load_state_dict(load(tmp_path / "all", like=part.like)["optimizer"])
            assert_parity(whole_state(world, part), expected, exact=True)
            written = part.state_dict()
        save({"optimizer": written}, tmp_path / str(size))
        again = get_hyper_optimizer(shard(world, make_model(world)))
        again.load_state_dict(load(tmp_path / str(size), like=again.like)["optimizer"])
        assert_parity(whole_state(world, again), expected, exact=True)
        assert [group["step"] for group in again.param_groups] == [2, 2]


@distributed(world_size=1)
def test_hyperparameters_that_are_functions_stay_and_dtypes_come_by_name(
    world: World, tmp_path: Path
) -> None:
    def made(**kwargs: Any) -> Any:
        rules = {"*.up.weight": {"rows": 2}}
        kwargs = {
            "scale": lambda rows, cols: 1.0,
            "split": rules,
            "ns_coefficients": [[3.0, -4.0, 2.0]],
            **kwargs,
        }
        return get_hyper_optimizer(make_model(world), muon_kwargs=kwargs)

    chain = made(ns_dtype=world.platform.dtype("float32"), ns_steps=1)
    train(world, chain, 0)
    save({"optimizer": chain.state_dict()}, tmp_path)
    other = made(ns_steps=2, split=None)
    own = other.optimizers_dict["muon"].param_groups[0]["scale"]
    other.load_state_dict(load(tmp_path)["optimizer"])
    (group,) = other.optimizers_dict["muon"].param_groups
    assert (group["ns_dtype"], group["ns_steps"], group["split"]) == (
        "float32",
        1,
        {"*.up.weight": {"rows": 2}},
    )
    assert group["scale"] is own
    train(world, other, 1)


@distributed(world_size=1)
def test_wrong_calls_are_refused_and_say_what_to_change(world: World) -> None:
    model = make_model(world)
    named = parameters(world, model)
    up, norm = named["layers.0.up.weight"], named["norm.weight"]
    rest = [p for p in named.values() if p is not up and p is not norm]
    stranger = world.platform.parameter(world.platform.zeros((2, 3), "float32", world.device))
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: get_hyper_optimizer([up]), TypeError, "the routing is made for a module, got a list"),
        (
            lambda: get_hyper_optimizer(model, muon_kwargs={"muon_lr": 1.0, "mu": 0.5, "muon_beta": 1}),
            ValueError,
            "muon_kwargs has 'mu', 'muon_beta', which Muon does not take; it takes lr, .*: remove or rename them",
        ),
        (
            lambda: get_hyper_optimizer(model, adamw_kwargs={"muon_lr": 1.0}),
            ValueError,
            "adamw_kwargs has 'muon_lr', which AdamW does not take; it takes amsgrad, betas, ",
        ),
        (
            lambda: get_hyper_optimizer(model, muon_kwargs={"lr": 1.0, "muon_lr": 0.5}),
            ValueError,
            "muon_kwargs has 'lr' with and without the prefix muon_: give it once",
        ),
        (
            lambda: get_hyper_optimizer(model, [up], [up, *rest, norm]),
            ValueError,
            "layers.0.up.weight is in muon_params and in adamw_params, and would be updated twice",
        ),
        (
            lambda: get_hyper_optimizer(model, [], rest),
            ValueError,
            "(norm.weight, layers.0.up.weight|layers.0.up.weight, norm.weight) are in neither of muon_params and adamw_params, "
            "and would stay untrained",
        ),
        (
            lambda: get_hyper_optimizer(model, None, [up, *rest]),
            ValueError,
            "norm.weight is in neither of muon_params and adamw_params",
        ),
        (
            lambda: get_hyper_optimizer(model, [stranger]),
            ValueError,
            r"muon_params: parameter 0 of group 0, of shape \(2, 3\), is no parameter of the model: make the groups after",
        ),
        (
            lambda: get_hyper_optimizer(model, up),
            ValueError,
            "muon_params: params is a .*: put it into a list",
        ),
        (
            lambda: get_hyper_optimizer(model, [{"lr": 1}]),
            ValueError,
            "muon_params: group 0: a group needs 'params'",
        ),
        (
            lambda: get_hyper_optimizer(model, [{"params": [up, norm]}]),
            ValueError,
            "Muon: .* is a vector; Muon makes matrices orthogonal",
        ),
        (
            lambda: get_hyper_optimizer(model, patterns={"norm.weight": "muon"}),
            ValueError,
            "gives Muon 'norm.weight' of shape",
        ),
        (lambda: get_hyper_optimizer(model, muon_kwargs={"lr": -1.0}), ValueError, "Muon: lr is -1.0"),
        (
            lambda: get_hyper_optimizer(model, [], [*rest, up, norm], patterns={"*": "adamw"}),
            ValueError,
            "patterns say what is chosen by the rule, .*: leave patterns out, or one of the lists",
        ),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
