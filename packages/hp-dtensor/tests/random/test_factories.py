"""DTensors that are made in pieces hold what the whole tensor holds, and no rank makes more than its piece."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hp_dtensor
from hp_dtensor import DTensor, Partial, Replicate, Shard, random
from hp_platform import init_device_mesh
from hp_platform.testing import World, count_collectives, distributed

R, S0, S1 = Replicate(), Shard(0), Shard(1)
FACTORIES: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "zeros": (lambda **on: hp_dtensor.zeros(5, 3, **on), lambda: np.zeros((5, 3), np.float32)),
    "zeros of a tuple": (
        lambda **on: hp_dtensor.zeros((5, 3), dtype="int32", **on),
        lambda: np.zeros((5, 3), np.int32),
    ),
    "ones": (lambda **on: hp_dtensor.ones([5, 3], **on), lambda: np.ones((5, 3), np.float32)),
    "full": (lambda **on: hp_dtensor.full((5, 3), 2.5, **on), lambda: np.full((5, 3), 2.5, np.float32)),
    "full of ints": (lambda **on: hp_dtensor.full((1, 2), 7, **on), lambda: np.full((1, 2), 7, np.int64)),
    "full of truth": (lambda **on: hp_dtensor.full((3, 3), True, **on), lambda: np.full((3, 3), True)),
    "nothing": (lambda **on: hp_dtensor.ones(0, 3, **on), lambda: np.ones((0, 3), np.float32)),
}
RANGES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "end": ((7,), np.arange(7)),
    "start and end": ((2, 9), np.arange(2, 9)),
    "step": ((2, 9, 3), np.arange(2, 9, 3)),
    "backwards": ((9, 2, -2), np.arange(9, 2, -2)),
    "floats": ((0.5, 3.0, 0.5), np.arange(0.5, 3.0, 0.5).astype(np.float32)),
    "none": ((0,), np.arange(0)),
}


def _meshes(world: World) -> list[Any]:
    shapes = [(world.size,), (2, 2)] if world.size == 4 else [(world.size,)]
    return [init_device_mesh(world.device_type, shape) for shape in shapes]


def _check(world: World, x: Any, expected: Any, placements: Any) -> None:
    assert isinstance(x, DTensor)
    assert x.placements == placements
    assert tuple(x.to_local().shape) == x.local_shape
    found = world.platform.to_numpy(x.full_tensor())
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", FACTORIES)
@distributed(world_size=(1, 2))
def test_constants_are_made_in_pieces(name: str, world: World) -> None:
    make, expected = FACTORIES[name]
    for mesh in _meshes(world):
        for placements in itertools.product([S0, S1, R], repeat=len(mesh.shape)):
            with count_collectives() as counted:
                x = make(device_mesh=mesh, placements=placements)
            counted.assert_counts()
            _check(world, x, expected(), placements)


@pytest.mark.parametrize("name", RANGES)
@distributed(world_size=(1, 2))
def test_ranges_are_made_in_pieces(name: str, world: World) -> None:
    args, expected = RANGES[name]
    for mesh in _meshes(world):
        for placements in itertools.product([S0, R], repeat=len(mesh.shape)):
            _check(
                world, hp_dtensor.arange(*args, device_mesh=mesh, placements=placements), expected, placements
            )


@pytest.mark.parametrize("name", ["rand", "randn"])
@distributed(world_size=(1, 2))
def test_random_numbers_are_those_of_a_plain_tensor(name: str, world: World) -> None:
    for mesh, dtype in itertools.product(_meshes(world), ("float32", "float64")):
        random.manual_seed(5)
        plain = getattr(random, name)(5, 3, dtype=dtype, device=world.device)
        for placements in itertools.product([S0, S1, R], repeat=len(mesh.shape)):
            stream = random.RandomStream(5)
            x = getattr(hp_dtensor, name)(
                (5, 3), device_mesh=mesh, placements=placements, dtype=dtype, generator=stream
            )
            _check(world, x, world.platform.to_numpy(plain), placements)
            assert stream.number == 1


@distributed(world_size=2)
def test_the_current_mesh_and_replicate_are_the_defaults(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    with mesh:
        made = [hp_dtensor.ones(3), hp_dtensor.empty(3, 2), hp_dtensor.randn(4), hp_dtensor.arange(4)]
    for x in made:
        assert x.placements == (R,)
        assert x.device_mesh is mesh
        assert not x.requires_grad
    leaf = hp_dtensor.ones(3, device_mesh=mesh, placements=[S0], requires_grad=True)
    assert leaf.requires_grad
    assert leaf.is_leaf


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a sum": (lambda mesh: hp_dtensor.ones(3, device_mesh=mesh, placements=[Partial()]), "summands"),
    "a size": (lambda mesh: hp_dtensor.ones(2.5, device_mesh=mesh), "whole numbers"),
    "a negative size": (lambda mesh: hp_dtensor.zeros((2, -1), device_mesh=mesh), "whole numbers"),
    "a mesh": (lambda mesh: hp_dtensor.zeros(2, device_mesh="cpu"), "DeviceMesh"),
    "placements": (lambda mesh: hp_dtensor.zeros(2, device_mesh=mesh, placements=[]), "one per mesh dim"),
    "a dim": (lambda mesh: hp_dtensor.zeros(2, device_mesh=mesh, placements=[S1]), "does not fit"),
    "a dtype": (lambda mesh: hp_dtensor.rand(2, device_mesh=mesh, dtype="int64"), "randint"),
    "no step": (lambda mesh: hp_dtensor.arange(0, 5, 0, device_mesh=mesh), "lead from one to the other"),
    "a step away": (lambda mesh: hp_dtensor.arange(0, 5, -1, device_mesh=mesh), "lead from one to the other"),
}


@pytest.mark.parametrize("case", WRONG)
@distributed(world_size=1)
def test_wrong_calls_say_what_to_change(case: str, world: World) -> None:
    call, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        call(init_device_mesh(world.device_type, (1,)))
