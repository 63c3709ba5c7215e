"""Dropout drops what the unsharded program drops, forward and backward, and reduces only what is a sum."""

import itertools
from typing import Any

import pytest

from hp_dtensor import Partial, Replicate, Shard, distribute_tensor, random
from hp_platform import init_device_mesh
from hp_platform.testing import World, count_collectives, distributed

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def _numbers(world: World, shape: tuple[int, ...]) -> Any:
    platform = world.platform
    return platform.reshape(platform.arange(1, shape[0] * shape[1] + 1, "float32", world.device), shape)


@distributed(world_size=(1, 2, 4))
def test_values_and_gradients_are_those_of_the_unsharded_dropout(world: World) -> None:
    platform = world.platform
    meshes = [(world.size,), (2, 2)] if world.size == 4 else [(world.size,)]
    for shape, mesh_shape in itertools.product([(5, 3), (1, 8)], meshes):
        mesh = init_device_mesh(world.device_type, mesh_shape)
        whole = _numbers(world, shape)
        leaf = platform.set_requires_grad_(platform.clone(whole), True)
        random.manual_seed(2)
        plain = random.dropout(leaf, 0.25)
        (gradient,) = platform.grad([plain], [leaf], [whole * 2])
        for placements in itertools.product([S0, S1, R], repeat=len(mesh_shape)):
            x = distribute_tensor(whole, mesh, placements).requires_grad_(True)
            random.manual_seed(2)
            with count_collectives() as counted:
                dropped = random.dropout(x, 0.25)
                dropped.backward(distribute_tensor(whole * 2, mesh, placements))
            counted.assert_counts()
            for found, expected in ((dropped, plain), (x.grad, gradient)):
                assert (platform.to_numpy(found.full_tensor()) == platform.to_numpy(expected)).all()


@distributed(world_size=2)
def test_a_sum_is_reduced_once_and_dropped_alike(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    whole = _numbers(world, (4, 3))
    x = distribute_tensor(whole, mesh, [P])
    random.manual_seed(2)
    with count_collectives() as counted:
        dropped = random.dropout(x)
    counted.assert_counts(all_reduce=1)
    assert dropped.placements == (R,)
    random.manual_seed(2)
    expected = world.platform.to_numpy(random.dropout(whole))
    assert (world.platform.to_numpy(dropped.to_local()) == expected).all()


@distributed(world_size=2)
def test_outside_of_training_nothing_happens(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    whole = _numbers(world, (4, 3))
    before = random.get_state()
    for x in (whole, *(distribute_tensor(whole, mesh, [p]) for p in (S0, R, P))):
        assert random.dropout(x, 0.5, training=False) is x
    assert random.get_state() == before


@distributed(world_size=1)
def test_everything_or_nothing_may_be_dropped(world: World) -> None:
    x = _numbers(world, (4, 3))
    assert (world.platform.to_numpy(random.dropout(x, 1.0)) == 0).all()
    assert (world.platform.to_numpy(random.dropout(x, 0.0)) == world.platform.to_numpy(x)).all()
    infinite = x * float("inf")
    assert (world.platform.to_numpy(random.dropout(infinite, 1.0)) == 0).all()


@distributed(world_size=1)
def test_the_second_derivative_is_that_of_a_product_with_a_constant(world: World) -> None:
    platform = world.platform
    x = platform.set_requires_grad_(_numbers(world, (4, 3)), True)
    if not platform.supports("double_backward", world.device_type):
        with pytest.raises(NotImplementedError, match="double_backward|second derivative|create_graph"):
            platform.grad([platform.sum(random.dropout(x, 0.5))], [x], create_graph=True)
        return
    random.manual_seed(2)
    factor = platform.to_numpy(random.dropout(platform.full((4, 3), 1, "float32", world.device), 0.5))
    random.manual_seed(2)
    y = random.dropout(x, 0.5)
    (first,) = platform.grad(
        [y * y], [x], [platform.full((4, 3), 1, "float32", world.device)], create_graph=True
    )
    assert (platform.to_numpy(first) == 2 * factor**2 * platform.to_numpy(x)).all()
    (second,) = platform.grad([first], [x], [platform.full((4, 3), 1, "float32", world.device)])
    assert (platform.to_numpy(second) == 2 * factor**2).all()
