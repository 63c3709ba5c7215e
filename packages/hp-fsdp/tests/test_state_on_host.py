"""Shards that wait in the host's memory while their mesh is one of accelerators: states go out and in as if they did not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_fsdp import (
    StateDictOptions,
    full_params,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import Maker, make_mesh

FULL = StateDictOptions(full_state_dict=True)
FROM_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def waiting(world: World, mesh: Any) -> tuple[Any, dict[str, Any]]:
    """A module whose shards lie on the cpu, and its values."""
    platform = world.platform
    module, values = Maker(world).linear(5, 3), {}
    for name, parameter in list(platform.named_parameters(module)):
        values[name] = platform.to_numpy(platform.detach(parameter))
        whole = platform.to_device(platform.detach(parameter), "cpu")
        platform.set_parameter(module, name, platform.parameter(distribute_tensor(whole, mesh, [Shard(0)])))
    return module, values


def lies_on_host(world: World, module: Any) -> bool:
    named = world.platform.named_parameters(module)
    return all(world.platform.device_of(p.to_local()) == "cpu" for _, p in named)


@distributed(world_size=2)
def test_states_of_shards_that_wait_on_the_host(world: World) -> None:
    platform, mesh = world.platform, make_mesh(world)
    module, values = waiting(world, mesh)
    assert_parity(get_model_state_dict(module, options=FULL), values, exact=True)
    shards = get_model_state_dict(module)
    assert {platform.device_of(x.to_local()) for x in shards.values()} == {"cpu"}
    assert_parity({n: x.to_local() for n, x in shards.items()}, weights(world, module), exact=True)
    on_device = {n: platform.tensor(x + 1, Maker(world).dtype, world.device) for n, x in values.items()}
    replicated = {n: distribute_tensor(x, mesh, [Replicate()]) for n, x in on_device.items()}
    for given, options in (
        (on_device, None),
        (replicated, None),
        (on_device if world.rank == 0 else {}, FROM_0),
    ):
        module, _ = waiting(world, mesh)
        assert set_model_state_dict(module, given, options=options) == ([], [])
        assert lies_on_host(world, module)
        assert_parity(get_model_state_dict(module, options=FULL), on_device, exact=True)
    with full_params(module, writeback=True):
        assert {platform.device_of(p) for _, p in platform.named_parameters(module)} == {"cpu"}
        assert_parity(module.weight, on_device["weight"], exact=True)
        platform.fill_(module.weight, 3)
    assert lies_on_host(world, module)
    assert_parity(get_model_state_dict(module, options=FULL)["weight"], values["weight"] * 0 + 3, exact=True)


def weights(world: World, module: Any) -> dict[str, Any]:
    return {n: world.platform.detach(p.to_local()) for n, p in world.platform.named_parameters(module)}


class Holder:
    """An optimizer as far as states are concerned."""

    def __init__(self, parameters: list[Any]) -> None:
        self.param_groups = [{"params": parameters, "lr": 0.1}]
        self.state: dict[Any, dict[str, Any]] = {}


@distributed(world_size=2)
def test_states_of_optimizers_wait_where_their_parameters_do(world: World) -> None:
    platform, mesh = world.platform, make_mesh(world)
    module, values = waiting(world, mesh)
    moments = {n: platform.tensor(x + 1, Maker(world).dtype, world.device) for n, x in values.items()}
    step = platform.full((), 3, "float32", world.device)
    given = {
        "state": {n: {"step": step, "moment": x} for n, x in moments.items()},
        "param_groups": [{"params": list(moments), "lr": 0.2}],
    }
    for state, options in ((given, None), (given if world.rank == 0 else {}, FROM_0)):
        optimizer = Holder([p for _, p in platform.named_parameters(module)])
        set_optimizer_state_dict(module, optimizer, state, options=options)
        for parameter, entry in optimizer.state.items():
            assert isinstance(entry["moment"], DTensor)
            assert entry["moment"].placements == parameter.placements
            places = {platform.device_of(entry["moment"].to_local()), platform.device_of(entry["step"])}
            assert places == {"cpu"}
        found = get_optimizer_state_dict(module, optimizer, options=FULL)
        assert_parity({n: x["moment"] for n, x in found["state"].items()}, moments, exact=True)
        assert found["param_groups"] == given["param_groups"]
