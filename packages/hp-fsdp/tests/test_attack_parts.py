"""Large layers of the root whose parameters are used by the root itself, before or after the layer's own call."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_fsdp import fully_shard, parts
from hp_platform.testing import World, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from attack_pairs import Pair
from fsdp_models import Maker


def used_twice(maker: Maker, first_by_root: bool) -> Any:
    platform = maker.platform

    def setup(module: Any) -> None:
        module.block, module.layer, module.other = (maker.linear(4, 4) for _ in range(3))
        module.scale = maker.parameter(4)

    def forward(module: Any, x: Any, rank: int) -> Any:
        x = module.block(x) * module.scale
        if first_by_root:
            y = platform.linear(platform.silu(module.other(x)), module.layer.weight)
            return platform.silu(module.layer(x)) * y
        return platform.linear(platform.silu(module.layer(x)), module.layer.weight)

    return maker.model(setup, forward)


def shard_block(model: Any, mesh: Any) -> None:
    fully_shard(model.block, mesh)
    fully_shard(model, mesh)


@pytest.mark.parametrize("first_by_root", [True, False])
@pytest.mark.parametrize("between", ["nothing", "an evaluation", "whole by hand"])
@distributed(world_size=2)
def test_parts_stay_until_the_last_of_their_uses_has_been_differentiated(
    world: World, first_by_root: bool, between: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MIN_NBYTES", 1)
        pair = Pair(world, lambda maker: used_twice(maker, first_by_root), shard_block)
        for batch in range(2):
            if between == "whole by hand":
                pair.sharded.unshard()
            loss = pair.loss(batch)
            if between == "an evaluation":
                with world.platform.no_grad():
                    pair.loss(7)
            pair.backward(loss)
            pair.backward(pair.reference_loss(batch))
            pair.check()


@distributed(world_size=2)
def test_what_the_root_was_told_to_gather_ahead_is_gathered_once(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MIN_NBYTES", 1)
        pair = Pair(world, lambda maker: used_twice(maker, False), shard_block)
        pair.sharded.set_modules_to_forward_prefetch([pair.sharded.block])
        for batch in range(3):
            with count_collectives() as counted:
                pair.backward(pair.loss(batch))
            # The block twice, and once the root and, where there are parts, the one that is used.
            num_parts = 1 if world.platform.supports("stand_ins", world.device) else 0
            counted.assert_counts(all_gather=3 + num_parts, reduce_scatter=2 + num_parts)
