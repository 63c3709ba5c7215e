"""The row is in step with the shards, whether they are parts of it or have memory of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_fsdp.arrangement import can_share
from hp_fsdp.buffer import FlatBuffer
from hp_fsdp.layout import plan_rows
from hp_fsdp.owner import Owner
from hp_fsdp.parameter import ManagedParameter
from hp_fsdp.places import find_places
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import PROGRAMS, Maker, check_three_steps, make_mesh

SHAPES = [(5, 2), (1,), (4, 3), (0, 2)]


class Lacking:
    """The platform without some capabilities."""

    def __init__(self, platform: Any, *lacks: str) -> None:
        self._platform, self._lacks = platform, lacks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def supports(self, capability: str, device: str | None = None) -> bool:
        return capability not in self._lacks and self._platform.supports(capability, device)


def buffer_of(world: World, platform: Any) -> tuple[FlatBuffer, list[Any], list[np.ndarray]]:
    maker, places = Maker(world), find_places(make_mesh(world), world.device)
    whole = [maker.parameter(*shape) for shape in SHAPES]
    values = [platform.to_numpy(platform.detach(parameter)) for parameter in whole]
    params = []
    for index, parameter in enumerate(whole):
        param = ManagedParameter(
            platform, parameter, (Owner(holder(world, parameter), "weight", f"{index}"),)
        )
        param.slot = plan_rows([param.shape], world.size).slots[0]
        param.cut(param.slot, places, world.device)
        params.append(param)
    buffer = FlatBuffer(
        platform,
        params,
        world.size,
        world.rank,
        world.device,
        shares_memory=can_share(platform, world.device),
    )
    return buffer, [param.shard for param in params], values


def holder(world: World, parameter: Any) -> Any:
    module = world.platform.Module()
    module.weight = parameter
    return module


def expected_row(values: list[np.ndarray], num_ranks: int, rank: int) -> np.ndarray:
    parts = []
    for value in values:
        rows = -(-len(value) // num_ranks)
        chunk = value[rank * rows : (rank + 1) * rows].ravel()
        padding = np.zeros(rows * int(np.prod(value.shape[1:])) - chunk.size, value.dtype)
        parts.append(np.concatenate([chunk, padding]))
    return np.concatenate(parts)


@pytest.mark.parametrize("lacks", [(), ("alias",)], ids=["shards in the row", "shards apart"])
@distributed(world_size=(1, 2, 3))
def test_the_row_follows_the_shards(world: World, lacks: tuple[str, ...]) -> None:
    platform = Lacking(world.platform, *lacks)
    buffer, shards, values = buffer_of(world, platform)
    assert (platform.to_numpy(buffer.row()) == expected_row(values, world.size, world.rank)).all()
    for shard in shards:
        platform.mul_(shard, 2.0)
    doubled = [2 * value for value in values]
    assert (platform.to_numpy(buffer.row()) == expected_row(doubled, world.size, world.rank)).all()


@distributed(world_size=2)
def test_shards_in_the_row_are_read_where_they_lie(world: World) -> None:
    if not world.platform.supports("alias", world.device):
        buffer, _, _ = buffer_of(world, world.platform)
        assert world.platform.data_ptr(buffer.row()) != world.platform.data_ptr(buffer.row())
        return
    buffer, shards, _ = buffer_of(world, world.platform)
    assert world.platform.data_ptr(buffer.row()) == world.platform.data_ptr(shards[0])


@pytest.mark.parametrize("name", ["mlp", "uneven", "tied"])
@distributed(world_size=2)
def test_training_is_the_same_with_shards_apart(world: World, name: str) -> None:
    platform = world.platform
    original = type(platform).supports
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(platform),
            "supports",
            lambda self, what, device=None: what != "alias" and original(self, what, device),
        )
        check_three_steps(world, PROGRAMS[name])
