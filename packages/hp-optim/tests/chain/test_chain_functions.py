"""Functions among the options of a chain's optimizers: given by arguments, and kept when a state is loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import load, save
from hp_optim import get_hyper_optimizer, sinkhorn
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from chain_models import dtype_of, make_model, parameters, shard, train


def chain_of(world: World, function: Any, **options: Any) -> Any:
    kwargs = {"ns_transform_fn": function, "muon_ns_dtype": dtype_of(world), **options}
    return get_hyper_optimizer(shard(world, make_model(world)), muon_kwargs=kwargs)


def wholes(world: World, chain: Any) -> list[Any]:
    platform = world.platform
    found = (platform.detach(p) for p in parameters(world, chain.model).values())
    return [platform.to_numpy(x.full_tensor() if hasattr(x, "full_tensor") else x) for x in found]


@distributed(world_size=(1, 2))
def test_a_function_comes_by_the_arguments_of_muon_and_stays_when_a_state_is_loaded(
    world: World, tmp_path: Path
) -> None:
    def scale(rows: int, cols: int) -> float:
        return 0.2

    chains = [chain_of(world, function, scale=scale) for function in (sinkhorn(3), sinkhorn(3), None)]
    for step, chain in enumerate(chains):
        train(world, chain, step)
    first, second, iterated = chains
    state = first.state_dict()
    assert not [key for key in state if key.endswith((".ns_transform_fn", ".scale"))]
    second.load_state_dict(state)
    groups = [each.optimizers_dict["muon"].param_groups[0] for each in chains]
    assert groups[1]["ns_transform_fn"] == sinkhorn(3)
    # Also through files, and from a run of Newton-Schulz, whose dict says that it has no function.
    own = groups[1]["ns_transform_fn"]
    save({"optimizer": iterated.state_dict()}, tmp_path)
    second.load_state_dict(load(tmp_path)["optimizer"])
    assert groups[1]["ns_transform_fn"] is own
    assert groups[1]["scale"] is scale
    iterated.load_state_dict(state)
    assert groups[2]["ns_transform_fn"] is None
    train(world, second, 5)


@distributed(world_size=(1, 2))
def test_it_moves_the_matrices_and_nothing_else(world: World) -> None:
    chains = [chain_of(world, function) for function in (None, sinkhorn(3))]
    for chain in chains:
        train(world, chain, 0)
    iterated, made = chains
    kinds = {route.name: route.optimizer for route in made.routing}
    for name, x, y in zip(
        parameters(world, made.model), wholes(world, iterated), wholes(world, made), strict=True
    ):
        assert (x == y).all() == (kinds[name] != "muon"), name


@distributed(world_size=1)
def test_what_others_call_the_coefficients_is_told(world: World) -> None:
    with pytest.raises(
        ValueError,
        match="'muon_ns_variant', which Muon does not take; .* 'ns_variant' is 'ns_coefficients' here",
    ):
        get_hyper_optimizer(make_model(world), muon_kwargs={"muon_ns_variant": "asym5"})
