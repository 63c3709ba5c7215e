"""Outputs that cannot tell of backward: none of a rank's asks for a gradient, or they are hidden in objects of unknown classes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_fsdp import fully_shard
from hp_fsdp.states import ShardState
from hp_platform.testing import World, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from attack_pairs import Pair
from fsdp_models import Maker


def skipping(maker: Maker) -> Any:
    """Each rank leaves out another one of two layers, and has zeros in its place."""
    platform = maker.platform

    def layer(left_out_by: int) -> Any:
        def setup(module: Any) -> None:
            module.inner = maker.linear(4, 4)

        return maker.model(
            setup,
            lambda module, x, rank: (
                platform.zeros_like(x) if rank == left_out_by else platform.silu(module.inner(x))
            ),
        )

    def setup(module: Any) -> None:
        module.before, module.after = maker.linear(4, 4), maker.linear(4, 4)
        module.layers = platform.ModuleList([layer(0), layer(1), layer(0)])

    def forward(module: Any, x: Any, rank: int) -> Any:
        x = module.before(x)
        for each in module.layers:
            x = x + each(x, rank=rank)
        return module.after(x)

    return maker.model(setup, forward)


class Closed:
    """Nobody looks inside."""

    def __init__(self, value: Any) -> None:
        self.value = value


def closed(maker: Maker, trains: bool) -> Any:
    """A unit with an output that nobody looks into."""

    def inner(module: Any) -> None:
        module.layer = maker.linear(4, 4, requires_grad=trains)

    unit = maker.model(inner, lambda module, x, rank: Closed(maker.platform.silu(module.layer(x))))

    def setup(module: Any) -> None:
        module.before, module.unit, module.after = maker.linear(4, 4), unit, maker.linear(4, 4)

    return maker.model(setup, lambda module, x, rank: module.after(module.unit(module.before(x)).value))


def shard_unit(model: Any, mesh: Any) -> None:
    fully_shard(model.unit, mesh)
    fully_shard(model, mesh)


@distributed(world_size=2)
def test_ranks_may_leave_out_different_units_and_launch_the_same_collectives(world: World) -> None:
    def shard(model: Any, mesh: Any) -> None:
        for layer in model.layers:
            fully_shard(layer, mesh)
        fully_shard(model, mesh)

    pair = Pair(world, skipping, shard)
    for batch in range(2):
        with count_collectives() as counted:
            pair.backward(pair.loss(batch))
        counted.assert_counts(all_gather=7, reduce_scatter=4)
        pair.backward(pair.reference_loss(batch))
        pair.check()


@pytest.mark.parametrize("trains", [True, False])
@distributed(world_size=2)
def test_hidden_outputs_are_differentiated_in_whatever_order(world: World, trains: bool) -> None:
    for order in ((0, 1), (1, 0)):
        pair = Pair(world, lambda maker: closed(maker, trains), shard_unit)
        losses = [pair.loss(0), pair.loss(1)]
        with world.platform.no_grad():
            pair.loss(2)
        for batch in order:
            pair.backward(losses[batch])
            pair.backward(pair.reference_loss(batch))
        pair.check()
        assert all(unit.state is ShardState.SHARDED for unit in pair.units)


@distributed(world_size=2)
def test_where_no_backward_can_come_nothing_stays_gathered(world: World) -> None:
    def build(maker: Maker) -> Any:
        def setup(module: Any) -> None:
            module.unit = maker.linear(4, 4, requires_grad=False)
            module.head = maker.linear(4, 4, requires_grad=False)

        return maker.model(setup, lambda module, x, rank: module.head(module.unit(x)))

    pair = Pair(world, build, shard_unit)
    pair.loss()
    assert [unit.state for unit in pair.units] == [ShardState.SHARDED, ShardState.SHARDED]
