"""Modules that return a parameter, or a part of one, whose memory is freed when they have ended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_fsdp import fully_shard, register_forward_method
from hp_fsdp.states import ShardState
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from attack_pairs import Pair
from fsdp_models import Maker, tolerance


def with_positions(maker: Maker, kind: str) -> Any:
    """A table of five positions, of which the samples take three, and a head that is the same table."""
    platform = maker.platform

    def rows(module: Any, x: Any, rank: int) -> Any:
        first = platform.narrow(module.weight, 0, 0, x.shape[0])
        return {"rows": first, "table": module.weight, "both": (first, {"table": module.weight})}[kind]

    def table(module: Any) -> None:
        module.weight = maker.parameter(5, 4)

    def setup(module: Any) -> None:
        module.positions = maker.model(table, rows)
        module.layer = maker.linear(4, 4)

    def forward(module: Any, x: Any, rank: int) -> Any:
        found = module.positions(x)
        if kind == "both":
            found, table = found[0], found[1]["table"]
        elif kind == "rows":
            table = found
        else:
            found, table = platform.narrow(found, 0, 0, x.shape[0]), found
        hidden = platform.silu(module.layer(x + found))
        return platform.linear(hidden, table)

    return maker.model(setup, forward)


def shard(model: Any, mesh: Any) -> None:
    fully_shard(model.positions, mesh)
    fully_shard(model, mesh)


@pytest.mark.parametrize("kind", ["rows", "table", "both"])
@distributed(world_size=2)
def test_what_a_unit_returns_of_its_parameters_outlives_it(world: World, kind: str) -> None:
    pair = Pair(world, lambda maker: with_positions(maker, kind), shard)
    for batch in range(2):
        pair.backward(pair.loss(batch))
        pair.backward(pair.reference_loss(batch))
        pair.check()
    with world.platform.no_grad():
        assert_parity(
            pair.sharded(pair.inputs(world.rank)),
            pair.reference(pair.inputs(world.rank)),
            **tolerance(world),
        )
    assert all(unit.state is ShardState.SHARDED for unit in pair.units)


@distributed(world_size=2)
def test_what_the_root_returns_of_its_parameters_can_be_read_after_backward_and_without(world: World) -> None:
    platform = world.platform

    def build(maker: Maker) -> Any:
        def setup(module: Any) -> None:
            module.layer = maker.linear(3, 4)

        return maker.model(setup, lambda module, x, rank: (module.layer(x), module.layer.weight))

    model, reference = build(Maker(world)), build(Maker(world))
    type(model).table = lambda module: platform.narrow(module.layer.weight, 0, 1, 2)
    fully_shard(model, Pair(world, build, lambda *_: None).mesh)
    register_forward_method(model, "table")
    expected = np.asarray(platform.to_numpy(platform.detach(reference.layer.weight)))
    maker = Maker(world)
    x = platform.tensor(np.ones((2, 4)), maker.dtype, maker.device)
    output, weight = model(x)
    platform.backward([platform.mean(output)])
    assert_parity(platform.detach(weight), expected, rtol=0, atol=0)
    with platform.no_grad():
        assert_parity(model(x)[1], expected, rtol=0, atol=0)
        assert_parity(model.table(), expected[1:3], rtol=0, atol=0)
