"""States in every mode of fully_shard: other dims, over tensor parallelism, replicated, offloaded, lists, from the meta device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import DTensor, Replicate, Shard, StridedShard, distribute_tensor
from hp_fsdp import (
    CPUOffloadPolicy,
    StateDictOptions,
    full_params,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import PROGRAMS, Maker, loss_of, make_mesh

FULL = StateDictOptions(full_state_dict=True)
FROM_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
ROWS = (1, 2, 3, 5, 17)


class Holder:
    """An optimizer as far as states are concerned."""

    def __init__(self, world: World, model: Any) -> None:
        named = world.platform.named_parameters(model)
        self.param_groups = [{"params": [p for _, p in named], "lr": 0.1}]
        self.state: dict[Any, dict[str, Any]] = {}


def rows_model(world: World) -> Any:
    """One linear layer for each number of rows, which call nothing of each other."""
    maker = Maker(world)

    def setup(module: Any) -> None:
        module.layers = maker.platform.ModuleList([maker.linear(rows, 3) for rows in ROWS])

    return maker.model(setup, lambda module, x, rank: [layer(x) for layer in module.layers])


def whole_values(world: World, model: Any) -> dict[str, Any]:
    platform = world.platform
    return {n: platform.to_numpy(platform.detach(p)) for n, p in platform.named_parameters(model)}


def check_round_trip(world: World, make: Any, expected: dict[str, Any]) -> None:
    """Whole values, shards, values of rank 0, whole parameters and an optimizer's state go out of and into such a model."""
    platform, model = world.platform, make()
    assert_parity(get_model_state_dict(model, options=FULL), expected, exact=True)
    device, dtype = world.device, Maker(world).dtype
    new = {name: platform.tensor(x + 1, dtype, device) for name, x in expected.items()}
    assert set_model_state_dict(model, new) == ([], [])
    assert_parity(get_model_state_dict(model, options=FULL), new, exact=True)
    for given, options in (
        (get_model_state_dict(model), None),
        (get_model_state_dict(model, options=StateDictOptions(True, True)), FROM_0),
    ):
        other = make()
        assert set_model_state_dict(other, given, options=options) == ([], [])
        assert_parity(get_model_state_dict(other, options=FULL), new, exact=True)
    with full_params(model, writeback=True):
        for name, parameter in platform.named_parameters(model):
            assert not isinstance(parameter, DTensor)
            assert_parity(parameter, new[name], exact=True, name=name)
            platform.mul_(parameter, 2)
    twice = get_model_state_dict(model, options=FULL)
    assert_parity(twice, {name: x * 2 for name, x in new.items()}, exact=True)
    optimizer = Holder(world, model)
    state = {"state": {n: {"moment": x} for n, x in new.items()}, "param_groups": [{"params": list(new)}]}
    assert set_optimizer_state_dict(model, optimizer, state) == ([], [])
    for parameter, entry in optimizer.state.items():
        assert entry["moment"].placements == parameter.placements
    assert_parity(
        get_optimizer_state_dict(model, optimizer, options=FULL)["state"], state["state"], exact=True
    )


@pytest.mark.parametrize("replicas", [1, 2])
@distributed(world_size=4, backends=("torch", "cuda"))
def test_shards_of_other_dims_and_replicated_parameters(world: World, replicas: int) -> None:
    mesh, expected = make_mesh(world, replicas), whole_values(world, rows_model(world))

    def make() -> Any:
        model = rows_model(world)
        return fully_shard(
            model,
            mesh,
            shard_placement_fn=lambda p: Shard(1) if len(p.shape) > 1 else None,
            replicate_params=[model.layers[3].weight, model.layers[4].bias],
        )

    assert make().layers[4].weight.placements[-1] == Shard(1)
    assert make().layers[3].weight.placements[-1] == Replicate()
    check_round_trip(world, make, expected)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=repr)
@distributed(world_size=4, backends=("torch", "cuda"))
def test_shards_of_tensor_parallel_parameters_of_any_number_of_rows(world: World, placement: Any) -> None:
    platform = world.platform
    mesh = init_device_mesh(world.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    expected = whole_values(world, rows_model(world))

    def make() -> Any:
        model = rows_model(world)
        for layer in model.layers:
            weight = distribute_tensor(platform.detach(layer.weight), mesh["tp"], [placement])
            platform.set_parameter(layer, "weight", platform.parameter(weight))
            bias = distribute_tensor(platform.detach(layer.bias), mesh["tp"], [Shard(0)])
            platform.set_parameter(layer, "bias", platform.parameter(bias))
        return fully_shard(model, mesh["dp"])

    found = make().layers[4].weight
    assert found.device_mesh.shape == (2, 2)
    assert found.placements == ((StridedShard(0, 2) if placement == Shard(0) else Shard(0)), placement)
    check_round_trip(world, make, expected)


@distributed(world_size=2)
def test_dtensors_that_stay_as_they_are(world: World) -> None:
    platform, mesh = world.platform, make_mesh(world)
    expected = whole_values(world, rows_model(world))

    def make() -> Any:
        model = rows_model(world)
        for layer in model.layers:
            for name, at in (("weight", Shard(1)), ("bias", Replicate())):
                dtensor = distribute_tensor(platform.detach(getattr(layer, name)), mesh, [at])
                platform.set_parameter(layer, name, platform.parameter(dtensor))
        return fully_shard(model)

    check_round_trip(world, make, expected)


@distributed(world_size=2)
def test_offloaded_shards_and_units_of_several_modules(world: World) -> None:
    expected = whole_values(world, rows_model(world))
    mesh = make_mesh(world)

    def make() -> Any:
        model = rows_model(world)
        fully_shard([model.layers[2], model.layers[4]], mesh, offload_policy=CPUOffloadPolicy())
        return fully_shard(model, mesh, offload_policy=CPUOffloadPolicy())

    model = make()
    shards = [p.to_local() for _, p in world.platform.named_parameters(model)]
    assert {world.platform.device_of(x) for x in shards} == {"cpu"}
    check_round_trip(world, make, expected)
    with (
        full_params(model),
        pytest.raises(RuntimeError, match=r"forward of HSDPLinear inside of full_params"),
    ):
        model.layers[4](Maker(world).parameter(2, 3))


@distributed(world_size=2)
def test_loading_between_steps_is_what_the_next_forward_computes_with(world: World) -> None:
    """Also where whole parameters are kept over the step, or in part."""
    program, platform = PROGRAMS["mlp"], world.platform
    for reshard in (True, False, 1):
        model = program.shard(program.build(Maker(world)), make_mesh(world), reshard_after_forward=reshard)
        model.set_reshard_after_backward(False)
        inputs = program.inputs(Maker(world), world.rank, 0)
        platform.backward([loss_of(platform, model(inputs))])
        dropped = model(inputs)
        assert tuple(dropped.shape) == (3, 3)
        reference = program.build(Maker(world))
        for _, parameter in platform.named_parameters(reference):
            platform.add_(parameter, 0.25)
        new = {name: platform.detach(p) for name, p in platform.named_parameters(reference)}
        set_model_state_dict(model, new)
        assert_parity(model(inputs), reference(inputs), exact=True)
        with full_params(model, writeback=True):
            for _, parameter in platform.named_parameters(model):
                platform.add_(parameter, 0.25)
        for _, parameter in platform.named_parameters(reference):
            platform.add_(parameter, 0.25)
        assert_parity(model(inputs), reference(inputs), exact=True)
