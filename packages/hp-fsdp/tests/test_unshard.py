"""When parameters are whole, and when they are shards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_fsdp.unit import units_in
from hp_platform.testing import World, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import (
    local,
    numpy_of,
)
from twins import Twins


@distributed(world_size=2)
def test_whole_parameters_are_there_after_unshard_and_gone_after_reshard(world: World) -> None:
    twins, platform = Twins(world), world.platform
    head = platform.get_submodule(twins.sharded, "head")
    expected = numpy_of(platform, twins.reference, platform.detach)["head.weight"]
    twins.sharded.unshard()
    assert np.array_equal(platform.to_numpy(head.weight), expected)
    twins.sharded.reshard()
    assert tuple(local(head.weight).shape) == ((2, 4) if world.rank == 0 else (1, 4))


@pytest.mark.parametrize(
    "has_backward", [True, False], ids=["kept behind backward", "of a loss that was dropped"]
)
@distributed(world_size=2)
def test_unshard_gathers_anew_what_was_written_since_the_last_pass(world: World, has_backward: bool) -> None:
    twins, platform = Twins(world), world.platform
    twins.sharded.set_reshard_after_backward(not has_backward)
    head = platform.get_submodule(twins.sharded, "head")
    loss = twins.loss(0)
    if has_backward:
        twins.backward(loss)
    for model in (twins.reference, twins.sharded):
        for _, parameter in platform.named_parameters(model):
            platform.set_grad(local(parameter), None)
            platform.mul_(platform.detach(local(parameter)), 0.5)
    twins.sharded.unshard()
    expected = numpy_of(platform, twins.reference, platform.detach)["head.weight"]
    assert np.array_equal(platform.to_numpy(head.weight), expected)
    twins.backward(twins.loss(1))
    twins.backward(twins.reference_loss(1))
    twins.step()
    twins.check("parameters")


@distributed(world_size=2)
def test_unshard_between_forward_and_backward_leaves_what_is_there(world: World) -> None:
    twins, platform = Twins(world), world.platform
    loss = twins.loss(0)
    with count_collectives() as counted:
        twins.sharded.unshard()
    if platform.supports("version_counter", world.device):
        counted.assert_counts()
    twins.sharded.reshard()
    twins.backward(loss)
    twins.backward(twins.reference_loss(0))
    twins.step()
    twins.check("parameters")


@distributed(world_size=2)
def test_memory_of_whole_parameters_is_held_only_while_it_is_needed(world: World) -> None:
    twins, platform = Twins(world), world.platform
    root, *blocks = units_in(platform, twins.sharded)

    def held(unit: Any) -> set[bool]:
        return {platform.storage_nbytes(param.full) > 0 for param in unit.params}

    assert [held(unit) for unit in (root, *blocks)] == [{False}] * 3
    loss = twins.loss(0)
    assert held(root) == {True}, "backward begins with the root"
    assert [held(unit) for unit in blocks] == [{False}] * 2
    twins.backward(loss)
    assert [held(unit) for unit in (root, *blocks)] == [{False}] * 3
    with platform.no_grad():
        twins.loss(0)
    assert [held(unit) for unit in (root, *blocks)] == [{False}] * 3


@distributed(world_size=2)
def test_parameters_are_shards_whenever_neither_forward_nor_backward_runs(world: World) -> None:
    twins, platform = Twins(world), world.platform
    shards = dict(platform.named_parameters(twins.sharded))

    def check() -> None:
        for name, parameter in platform.named_parameters(twins.sharded):
            assert parameter is shards[name]

    check()
    loss = twins.loss(0)
    check()
    twins.backward(loss)
    check()
    assert len(shards) == len(twins.shapes)
