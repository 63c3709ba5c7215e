"""What a side stream reads is held until the computation has waited for it: the allocator knows nothing of other streams."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

from hp_fsdp import MixedPrecisionPolicy, fully_shard, hsdp_sync_stream
from hp_fsdp.unit import unit_of
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from attack_pairs import Pair
from fsdp_models import Maker


def two_layers(maker: Maker) -> Any:
    def setup(module: Any) -> None:
        module.unit, module.head = maker.linear(4, 4), maker.linear(4, 4)

    return maker.model(setup, lambda module, x, rank: module.head(module.unit(x)))


@distributed(world_size=4, min_world_size=4, backends=("torch", "cuda", "npu"))
def test_pieces_of_the_small_world_are_held_until_the_gather_was_waited_for(world: World) -> None:
    def shard(model: Any, mesh: Any) -> None:
        fully_shard(model.unit, mesh, reshard_after_forward=2)
        fully_shard(model, mesh)

    pair = Pair(world, two_layers, shard)
    unit = unit_of(pair.sharded.unit)
    assert unit is not None
    assert unit.small_world is not None
    loss = pair.loss()
    pieces = [weakref.ref(piece) for piece in unit.small_world._pieces]
    unit.launch_gather()
    gc.collect()
    assert pieces
    assert all(piece() is not None for piece in pieces)
    unit.unshard()
    gc.collect()
    assert all(piece() is None for piece in pieces)
    pair.backward(loss)
    pair.backward(pair.reference_loss())
    pair.check()


@distributed(world_size=4, min_world_size=4, backends=("torch", "cuda", "npu"))
def test_sums_that_wait_for_replicas_are_held_until_their_reduction_is_over(world: World) -> None:
    precision = MixedPrecisionPolicy(
        param_dtype="bfloat16", reduce_dtype="bfloat16"
    )  # so that gradients are copies

    def shard(model: Any, mesh: Any) -> None:
        fully_shard(model.unit, mesh, mp_policy=precision)
        fully_shard(model, mesh, mp_policy=precision)

    pair = Pair(world, two_layers, shard, replicas=2)
    pair.sharded.set_is_last_backward(False)
    for batch in range(2):
        pair.sharded.set_requires_all_reduce(batch == 1)
        pair.backward(pair.loss(batch))
        if batch == 0:
            hsdp_sync_stream()
            kept = [row for unit in pair.units for _, row in unit.gradients._kept.values()]
            sums = [weakref.ref(row) for row in kept]
            del kept
    gc.collect()
    assert len(sums) == 2
    assert all(row() is not None for row in sums)
    hsdp_sync_stream()
