"""Tensors that are only kept in pieces: a plain tensor beside them is refused, also behind what was made of them alone."""

from __future__ import annotations

import pytest

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_dtensor.storage_mesh import advice_of, storage_mesh
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

ADVICE = "make it whole before {method}"


@distributed(world_size=(1, 2))
def test_plain_tensors_beside_a_tensor_in_storage_are_refused(world: World) -> None:
    platform = world.platform
    mesh = init_device_mesh(world.device_type, (world.size,))
    plain = platform.full((3, 4), 2.0, "float32", world.device)
    weight = distribute_tensor(plain, storage_mesh(mesh, ADVICE), [Shard(0)])
    for stored in (weight, weight + weight, platform.transpose(platform.transpose(weight, 0, 1), 0, 1)):
        for call in (lambda x=stored: x * plain, lambda x=stored: plain + x):
            with pytest.raises(
                RuntimeError, match=r"plain tensor of shape \(3, 4\), beside .* make it whole before name"
            ):
                call()
    number = platform.full((), 3.0, "float32", world.device)
    assert_parity((weight * number).full_tensor(), plain * 3.0, exact=True)
    assert_parity(weight.full_tensor() * plain, plain * plain, exact=True)


@distributed(world_size=(1, 2))
def test_beside_a_distributed_tensor_it_is_a_tensor_as_any_other(world: World) -> None:
    platform = world.platform
    mesh = init_device_mesh(world.device_type, (world.size,))
    plain = platform.full((3, 4), 2.0, "float32", world.device)
    stored = distribute_tensor(plain, storage_mesh(mesh, ADVICE), [Shard(0)])
    given = distribute_tensor(plain, mesh, [Replicate()])
    for product in (stored * given, given * stored):
        assert isinstance(product, DTensor)
        assert product.device_mesh == mesh
        assert_parity((product * plain).full_tensor(), plain * plain * plain, exact=True)


@distributed(world_size=1)
def test_the_storage_mesh_is_equal_and_made_once(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (1,))
    stored = storage_mesh(mesh, ADVICE)
    assert stored == mesh
    assert stored is not mesh
    assert storage_mesh(mesh, ADVICE) is stored
    assert storage_mesh(mesh, "another") is not stored
    assert storage_mesh(stored, "another") is stored
    assert (advice_of(mesh), advice_of(stored)) == (None, ADVICE)
