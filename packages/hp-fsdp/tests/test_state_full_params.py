"""``full_params``: whole plain parameters for a while, with or without writing them back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DTensor, Replicate, Shard, StridedShard, distribute_tensor
from hp_fsdp import StateDictOptions, full_params, get_model_state_dict
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import PROGRAMS, Maker, loss_of, make_mesh

FULL = StateDictOptions(full_state_dict=True)


def objects(world: World, model: Any) -> list[int]:
    return [id(p) for _, p in world.platform.named_parameters(model, remove_duplicate=False)]


@pytest.mark.parametrize("name", ["mlp", "tied", "scalars", "uneven", "frozen"])
@distributed(world_size=(1, 3))
def test_parameters_are_whole_and_plain_inside_and_the_same_shards_after(world: World, name: str) -> None:
    program, platform = PROGRAMS[name], world.platform
    reference = program.build(Maker(world))
    expected = dict(platform.named_parameters(reference, remove_duplicate=False))
    model = program.shard(program.build(Maker(world)), make_mesh(world))
    before = objects(world, model)
    with count_collectives() as counted, full_params(model):
        found = dict(platform.named_parameters(model, remove_duplicate=False))
        assert list(found) == list(expected)
        for key, parameter in found.items():
            assert platform.is_parameter(parameter) and not isinstance(parameter, DTensor)
            assert parameter.requires_grad == expected[key].requires_grad
            platform.fill_(parameter, 7)  # forgotten
        assert set(platform.state_dict(model)) == set(expected)
        assert len({id(p) for p in found.values()}) == len({id(p) for p in expected.values()})
    sharded = {id(p): p for p in expected.values() if p.shape}
    counted.assert_counts(all_gather=len(sharded) if world.size > 1 else 0)
    assert objects(world, model) == before
    assert_parity(
        get_model_state_dict(model, options=FULL),
        {n: platform.detach(p) for n, p in expected.items()},
        exact=True,
    )


@pytest.mark.parametrize("name", ["mlp", "tied", "scalars", "uneven"])
@distributed(world_size=(1, 3))
def test_what_is_written_goes_back_and_training_goes_on_with_it(world: World, name: str) -> None:
    program, platform = PROGRAMS[name], world.platform
    reference = program.build(Maker(world))
    model = program.shard(program.build(Maker(world)), make_mesh(world))
    before = objects(world, model)
    with full_params(model, writeback=True), count_collectives() as counted:
        for each in (model, reference):
            for index, (_, parameter) in enumerate(platform.named_parameters(each)):
                platform.add_(parameter, index + 1)
    counted.assert_counts()
    assert objects(world, model) == before
    expected = {
        n: platform.detach(p) for n, p in platform.named_parameters(reference, remove_duplicate=False)
    }
    assert_parity(get_model_state_dict(model, options=FULL), expected, exact=True)
    inputs = program.inputs(Maker(world), 0, 0)
    assert_parity(model(inputs), reference(inputs), exact=True)


@pytest.mark.parametrize(
    "placements", [(StridedShard(0, 2), Shard(0)), (Shard(1), Shard(0)), (Replicate(), Shard(1))]
)
@distributed(world_size=4, backends=("torch", "cuda"))
def test_every_placement_becomes_whole_and_is_written_back(world: World, placements: Any) -> None:
    platform = world.platform
    mesh = init_device_mesh(world.device_type, (2, 2))
    for rows in (1, 2, 3, 5, 17):
        module = Maker(world).linear(rows, 3)
        values = platform.to_numpy(platform.detach(module.weight))
        dtensor = distribute_tensor(platform.detach(module.weight), mesh, placements)
        platform.set_parameter(module, "weight", platform.parameter(dtensor))
        with full_params(module, writeback=True):
            assert_parity(module.weight, values, exact=True)
            platform.mul_(module.weight, 2)
        assert module.weight.placements == placements
        assert_parity(get_model_state_dict(module, options=FULL)["weight"], 2 * values, exact=True)


@distributed(world_size=2)
def test_an_average_of_weights_is_kept_whole_and_exchanged_for_a_while(world: World) -> None:
    """The average of two states, as it is kept beside training and evaluated with."""
    program, platform = PROGRAMS["tied"], world.platform
    model = program.shard(program.build(Maker(world)), make_mesh(world))
    with full_params(model):
        average = {n: platform.clone(platform.detach(p)) for n, p in platform.named_parameters(model)}
    with full_params(model, writeback=True):
        for _, parameter in platform.named_parameters(model):
            platform.add_(parameter, 2)
    with full_params(model):
        for name, parameter in platform.named_parameters(model):
            platform.mul_(average[name], 0.5)
            platform.add_(average[name], platform.detach(parameter), alpha=0.5)
    kept = get_model_state_dict(model, options=FULL)
    with full_params(model, writeback=True):
        for name, parameter in platform.named_parameters(model):
            platform.copy_(parameter, average[name])
    reference = program.build(Maker(world))
    for _, parameter in platform.named_parameters(reference):
        platform.add_(parameter, 1)
    inputs = program.inputs(Maker(world), 0, 0)
    # (x + (x + 2)) / 2 and x + 1 round differently by one unit in the last place.
    limit = 1e-13 if Maker(world).dtype == "float64" else 1e-4
    assert_parity(model(inputs), reference(inputs), rtol=0.0, atol=limit)
    assert_parity(kept["embed.weight"], platform.detach(reference.embed.weight) + 1, rtol=0.0, atol=limit)


@distributed(world_size=2)
def test_forward_inside_and_a_block_in_a_block_are_refused_and_leave_no_trace(world: World) -> None:
    program, platform = PROGRAMS["mlp"], world.platform
    model = program.shard(program.build(Maker(world)), make_mesh(world))
    before, inputs = objects(world, model), program.inputs(Maker(world), world.rank, 0)
    expected = {n: platform.to_numpy(x) for n, x in get_model_state_dict(model, options=FULL).items()}
    for call, error, message in (
        (
            lambda: model(inputs),
            RuntimeError,
            r"forward of HSDPModel inside of full_params: units gather by them",
        ),
        (lambda: model.blocks[0](inputs), RuntimeError, r"forward of HSDPBlock inside of full_params"),
        (lambda: full_params(model).__enter__(), RuntimeError, r"full_params is open already for HSDPModel"),
        (lambda: full_params(model.blocks[1]).__enter__(), RuntimeError, r"open already for HSDPBlock"),
    ):
        with full_params(model, writeback=True), pytest.raises(error, match=message):
            call()
        assert objects(world, model) == before

    def leave_by_an_exception() -> None:
        with full_params(model, writeback=True):
            platform.fill_(model.head.bias, 9)
            raise KeyError("not written back")

    def leave_with_another_shape() -> None:
        with full_params(model, writeback=True):
            platform.fill_(model.blocks[0].inner.bias, 9)
            longer = platform.zeros((4,), Maker(world).dtype, world.device)
            platform.set_parameter(model.head, "bias", platform.parameter(longer))

    with pytest.raises(KeyError):
        leave_by_an_exception()
    message = r"'head\.bias' has shape \(4,\) at the end of full_params, and had \(3,\): only values"
    with pytest.raises(ValueError, match=message):
        leave_with_another_shape()
    for wrong, message in (
        (lambda: full_params(model, writeback=1).__enter__(), "writeback must be True or False, got 1"),
        (lambda: full_params([model]).__enter__(), r"full_params takes a module of \w+, got list"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    assert objects(world, model) == before
    assert_parity(get_model_state_dict(model, options=FULL), expected, exact=True)
    platform.backward([loss_of(platform, model(inputs))])  # the hooks are gone
    assert all(
        np.isfinite(platform.to_numpy(p.grad.to_local())).all() for _, p in platform.named_parameters(model)
    )


@distributed(world_size=2)
def test_a_block_between_forward_and_backward_disturbs_neither(world: World) -> None:
    program, platform = PROGRAMS["mlp"], world.platform
    gradients = []
    for look in (False, True):
        model = program.shard(program.build(Maker(world)), make_mesh(world))
        loss = loss_of(platform, model(program.inputs(Maker(world), world.rank, 0)))
        if look:
            with full_params(model):
                assert tuple(model.head.weight.shape) == (3, 4)
        platform.backward([loss])
        gradients.append({n: platform.get_grad(p) for n, p in platform.named_parameters(model)})
    assert_parity(gradients[1], gradients[0], exact=True)
