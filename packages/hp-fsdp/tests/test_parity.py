"""Sharded training gives the numbers of one process: outputs, every gradient, parameters after three steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import (
    PROGRAMS,
    Maker,
    loss_of,
    make_mesh,
    numpy_of,
    reference_gradients,
    sgd_step,
    tolerance,
    whole,
)


def check_three_steps(world: World, name: str, replicas: int = 1, **kwargs: object) -> None:
    program, platform = PROGRAMS[name], world.platform
    reference, sharded = program.build(Maker(world)), program.build(Maker(world))
    shapes = {n: tuple(p.shape) for n, p in platform.named_parameters(reference)}
    mesh = make_mesh(world, replicas)
    program.shard(sharded, mesh, **kwargs)
    assert [n for n, _ in platform.named_parameters(sharded)] == list(shapes)
    limits = tolerance(world)
    for step in range(3):
        maker = Maker(world)
        outputs = reference_gradients(program, maker, reference, world.size, step)
        output = sharded(program.inputs(maker, world.rank, step), rank=world.rank)
        assert_parity(output, outputs[world.rank], **limits, name=f"output of step {step}")
        platform.backward([loss_of(platform, output)])
        assert_parity(
            whole(world, sharded, shapes, mesh, platform.get_grad),
            numpy_of(platform, reference, platform.get_grad),
            **limits,
            name=f"gradients of step {step}",
        )
        sgd_step(platform, reference)
        sgd_step(platform, sharded)
    assert_parity(
        whole(world, sharded, shapes, mesh, platform.detach),
        numpy_of(platform, reference, platform.detach),
        **limits,
        name="parameters after three steps",
    )


@pytest.mark.parametrize("name", list(PROGRAMS))
@distributed(world_size=(1, 2, 3, 4))
def test_training_sharded_equals_training_in_one_process(world: World, name: str) -> None:
    check_three_steps(world, name)


@pytest.mark.parametrize("name", ["mlp", "twice", "branches"])
@distributed(world_size=2)
def test_so_it_does_when_parameters_stay_whole_between_forward_and_backward(world: World, name: str) -> None:
    check_three_steps(world, name, reshard_after_forward=False)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("name", ["mlp", "branches", "scalars"])
@distributed(world_size=4, backends="torch")
def test_so_it_does_on_a_mesh_that_replicates_and_shards(world: World, name: str, replicas: int) -> None:
    check_three_steps(world, name, replicas=replicas)
