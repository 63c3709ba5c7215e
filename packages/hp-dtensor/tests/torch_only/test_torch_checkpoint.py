"""torch.distributed.checkpoint saves and loads DTensors through its own code."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hp_dtensor import Partial, Replicate, Shard, distribute_tensor
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, distributed

SHAPES = [(6, 4), (7, 5), (1, 3), (0, 3)]


def _full(world: World, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1.0, 1 + shape[0] * shape[1], device=world.device).view(shape)


def _state(world: World, mesh: DeviceMesh, placements: list[Any], factor: float = 1.0) -> dict[str, Any]:
    return {str(shape): distribute_tensor(_full(world, shape) * factor, mesh, placements) for shape in SHAPES}


def _assert_holds(world: World, state: dict[str, Any], mesh: DeviceMesh, placements: list[Any]) -> None:
    for name, x in _state(world, mesh, placements).items():
        assert torch.equal(state[name].to_local(), x.to_local()), (name, placements)


@distributed(world_size=(2, 4), backends=("torch", "cuda", "npu"))
def test_it_saves_from_and_loads_into_every_placement_and_plain_tensors(tmp_path: Path, world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    ways = [[Shard(0)], [Shard(1)], [Replicate()]]
    for source in ways:
        path = tmp_path / str(source)
        dcp.save({"model": _state(world, mesh, source)}, checkpoint_id=path)
        for target in ways:
            mine = _state(world, mesh, target, -1.0)
            dcp.load({"model": mine}, checkpoint_id=path)
            _assert_holds(world, mine, mesh, target)
        plain = {str(shape): torch.zeros(shape, device=world.device) for shape in SHAPES}
        dcp.load({"model": plain}, checkpoint_id=path)
        for shape in SHAPES:
            assert torch.equal(plain[str(shape)], _full(world, shape))
    dcp.save({"model": plain}, checkpoint_id=tmp_path / "plain")
    mine = _state(world, mesh, [Shard(1)], -1.0)
    dcp.load({"model": mine}, checkpoint_id=tmp_path / "plain")
    _assert_holds(world, mine, mesh, [Shard(1)])


@distributed(world_size=4, backends=("torch", "cuda"))
def test_a_grid_loads_into_a_line(tmp_path: Path, world: World) -> None:
    grid = init_device_mesh(world.device_type, (2, 2))
    line = init_device_mesh(world.device_type, (4,))
    for placements in ([Shard(0), Shard(0)], [Shard(1), Shard(0)], [Replicate(), Shard(1)]):
        path = tmp_path / str(placements)
        dcp.save(_state(world, grid, placements), checkpoint_id=path)
        mine = _state(world, line, [Shard(0)], -1.0)
        dcp.load(mine, checkpoint_id=path)
        _assert_holds(world, mine, line, [Shard(0)])


@distributed(world_size=2, backends=("torch",))
def test_its_asynchronous_save_does_not_see_later_changes(tmp_path: Path, world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    state = _state(world, mesh, [Shard(0)])
    saving = dcp.async_save(state, checkpoint_id=tmp_path)
    for x in state.values():
        x.to_local().add_(1)
    saving.result()
    mine = _state(world, mesh, [Shard(1)], -1.0)
    dcp.load(mine, checkpoint_id=tmp_path)
    _assert_holds(world, mine, mesh, [Shard(1)])


@distributed(world_size=2, backends=("torch",))
def test_a_sum_is_refused(tmp_path: Path, world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    x = distribute_tensor(_full(world, (6, 4)), mesh, [Partial()])
    with pytest.raises(
        dcp.api.CheckpointException, match=r"x has placements .*redistribute\(\) it to Shard or Replicate"
    ):
        dcp.save({"x": x}, checkpoint_id=tmp_path)
