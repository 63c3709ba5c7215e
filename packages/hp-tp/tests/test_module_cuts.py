"""Modules that say how they are cut, or are told; fused projections that are cut part by part."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_platform.testing import World, assert_parity, distributed
from hp_tp import ColwiseParallel, ModuleCuts, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parent))
from style_layers import PLACES, check, classes, input_of, loss_of
from tp_models import Maker, make_mesh, tolerance
from tp_training import backward


@distributed(world_size=(1, 2, 3))
def test_a_module_says_how_it_is_cut(world: World) -> None:
    own = classes(world.platform)
    check(world, own.Gate, ColwiseParallel(), out=Shard(-1), name="Gate")
    check(
        world, own.Gate, ColwiseParallel(input_layouts=Shard(1)), "cut", out=Shard(-1), name="Gate of a piece"
    )
    check(world, own.Scale, ColwiseParallel(), "features", out=Shard(-1), name="Scale")
    check(world, own.Down, RowwiseParallel(), "features", name="Down")
    check(
        world, own.Down, RowwiseParallel(output_layouts=Shard(1)), "features", out=Shard(1), name="Down, cut"
    )


@distributed(world_size=2)
def test_a_style_is_told_how_a_module_is_cut_and_may_let_it_run_on_dtensors(world: World) -> None:
    own = classes(world.platform)
    on_dtensors = ModuleCuts({"weight": 0, "bias": 0, "scale": 0, "factor": None}, on_dtensors=True)
    check(world, own.Gate, ColwiseParallel(cuts=on_dtensors), out=Shard(-1), name="Gate")
    # The module's own word is not asked.
    check(
        world,
        own.Down,
        RowwiseParallel(cuts=ModuleCuts({"weight": 0, "shift": None, "factor": None}, on_dtensors=True)),
        "features",
        name="Down",
    )


@distributed(world_size=(1, 2, 3))
def test_a_fused_projection_is_cut_part_by_part(world: World) -> None:
    """The pieces of q, k and v come out one after the other; gradients of the parts are those of the fused weight's rows."""
    platform, limits, mesh = world.platform, tolerance(world), make_mesh(world)
    sizes = {"q": 12, "k": 6, "v": 6}
    for given, parts in (("whole", sizes), ("cut", list(sizes.values()))):
        reference = Maker(world).linear(6, 24)
        heads = {"q": 6, "k": 6, "v": 6} if parts is sizes else None
        style = ColwiseParallel(parts=parts, heads=heads, input_layouts=PLACES[given])
        layer = parallelize_module(Maker(world).linear(6, 24), mesh, style)
        x = input_of(world, 6)
        piece = distribute_tensor(platform.detach(x), mesh, [PLACES[given]]).to_local()
        y = layer(piece)
        own = [size // world.size for size in sizes.values()]
        expected = reference(x)
        total = None
        for part, whole_part in zip(
            platform.split(y, own, 2), platform.split(expected, list(sizes.values()), 2), strict=True
        ):
            joined = DTensor.from_local(part, mesh, [Shard(-1)], shape=tuple(whole_part.shape))
            assert_parity(joined, whole_part, **limits, name="part")
            loss = loss_of(world, joined)
            total = loss if total is None else total + loss
        backward(platform, total)
        losses = [loss_of(world, part) for part in platform.split(expected, list(sizes.values()), 2)]
        backward(platform, losses[0] + losses[1] + losses[2])
        names = list(sizes) if parts is sizes else ["0", "1", "2"]
        for name in ("weight", "bias"):
            rows = platform.split(platform.get_grad(getattr(reference, name)), list(sizes.values()))
            for part_name, gradient in zip(names, rows, strict=True):
                ours = getattr(layer, f"{name}_{part_name}")
                assert ours.placements == (Shard(0),)
                assert_parity(ours.grad, gradient, **limits, name=f"{name}_{part_name}")
        assert {n for n, _ in platform.named_parameters(layer)} == {
            f"{name}_{part}" for name in ("weight", "bias") for part in names
        }


@distributed(world_size=4)
def test_parts_of_a_fused_projection_may_be_heads_that_several_ranks_compute(world: World) -> None:
    """12 query heads share 3 of keys and values, 4 each: the queries of every rank find theirs, in order."""
    platform, mesh, size = world.platform, make_mesh(world), 2
    parts = {"q": 12 * size, "k": 3 * size, "v": 3 * size}
    style = ColwiseParallel(parts=parts, heads={"q": 12, "k": 3, "v": 3}, query_heads=12, replicate_kv=True)
    reference, layer = Maker(world).linear(6, 36), parallelize_module(Maker(world).linear(6, 36), mesh, style)
    x = input_of(world, 6)
    q, k, v = platform.split(reference(x), list(parts.values()), 2)
    queries = range(12 // world.size * world.rank, 12 // world.size * (world.rank + 1))
    # 6 queries share two by two: 0, 0, 0, 0, 1, 1 is 0, 0, 1. 3 queries find one each.
    heads = [i // 4 for i in queries][:: math.gcd(len(queries), 4)]

    def columns(x: Any, heads: Any) -> Any:
        return platform.to_numpy(x)[..., [size * head + i for head in heads for i in range(size)]]

    expected = np.concatenate([columns(q, queries), columns(k, heads), columns(v, heads)], -1)
    np.testing.assert_allclose(platform.to_numpy(layer(x)), expected, rtol=0, atol=tolerance(world)["atol"])
    assert layer.weight_k.placements == (Replicate(),)
