"""Several collectives in one launch, given outputs, groups of one rank, and what a record counts."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from hp_platform import collectives, group_of, record_collectives
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from collective_values import DTYPES, WORLDS, groups, reduced, refused, same, tensor, value


@pytest.mark.parametrize("dtype", DTYPES)
@distributed(world_size=WORLDS)
def test_coalesced_collectives_equal_single_ones_and_launch_once(world: World, dtype: str) -> None:
    for group in groups(world):
        n = group.size
        shapes = [(2, 3), (1,), (0, 2), (3, 2)]
        mine = [
            tensor(world, value(group.global_rank + i, s, dtype), dtype, "transposed" if len(s) == 2 else "")
            for i, s in enumerate(shapes)
        ]
        with record_collectives() as record:
            gathered = collectives.all_gather_coalesced(mine, group).wait()
        assert record.counts() == ({"all_gather": 1} if n > 1 else {})
        for i, (result, shape) in enumerate(zip(gathered, shapes, strict=True)):
            same(
                world, result, np.concatenate([value(rank + i, shape, dtype) for rank in group.ranks]), dtype
            )
        if refused(world, dtype):
            continue
        op = "max" if dtype == "bool" else "sum"
        wide = [(n * s[0], *s[1:]) for s in shapes]
        xs = [tensor(world, value(group.global_rank + i, s, dtype), dtype) for i, s in enumerate(wide)]
        for call, cut in (
            (collectives.reduce_scatter_coalesced, True),
            (collectives.all_reduce_coalesced, False),
        ):
            with record_collectives() as record:
                results = call(xs, group, op).wait()
            assert len(record.launches) == (1 if n > 1 else 0)
            for i, (result, shape) in enumerate(zip(results, wide, strict=True)):
                whole = reduced(op, [value(rank + i, shape, dtype) for rank in group.ranks], dtype)
                same(world, result, np.split(whole, n)[group.rank] if cut else whole, dtype)


@distributed(world_size=(1, 3, 4))
def test_coalesced_mean_divides_once(world: World) -> None:
    xs = [world.platform.full((world.size, 2), float(world.rank), device=world.device) for _ in range(2)]
    expected = (world.size - 1) / 2
    for call in (collectives.reduce_scatter_coalesced, collectives.all_reduce_coalesced):
        for result in call(xs, op="mean").wait():
            np.testing.assert_allclose(world.platform.to_numpy(result), expected, rtol=2**-23)


@distributed(world_size=(1, 3, 4))
def test_out_is_filled_and_returned(world: World) -> None:
    platform, n = world.platform, world.size
    ones = platform.full((2 * n, 3), 1.0, device=world.device)
    out = platform.zeros((2 * n, 3), device=world.device)
    assert collectives.all_reduce(ones, out=out) is out
    same(world, out, np.full((2 * n, 3), float(n), "float32"), "float32")
    assert collectives.all_reduce(ones, out=ones, async_op=True).wait() is ones
    same(world, ones, np.full((2 * n, 3), float(n), "float32"), "float32")
    block = platform.zeros((2, 3), device=world.device)
    assert collectives.reduce_scatter(ones, out=block) is block
    same(world, block, np.full((2, 3), float(n * n), "float32"), "float32")
    assert collectives.all_gather(block, out=out) is out
    same(world, out, np.full((2 * n, 3), float(n * n), "float32"), "float32")
    wide = platform.zeros((2, 3), "float64", world.device)
    assert (
        collectives.broadcast(platform.full((2, 3), 5.0 + world.rank, device=world.device), 0, out=wide)
        is wide
    )
    same(world, wide, np.full((2, 3), 5.0), "float64")


@distributed(world_size=(1, 3, 4))
def test_a_group_of_one_rank_is_the_identity_and_launches_nothing(world: World) -> None:
    alone = group_of([world.rank])
    x = tensor(world, value(world.rank, (2, 3), "float32"), "float32")
    expected = world.platform.to_numpy(x)
    with record_collectives() as record:
        results = [
            collectives.all_reduce(x, alone, "mean"),
            collectives.reduce_scatter(x, alone),
            collectives.all_gather(x, alone),
            collectives.broadcast(x, world.rank, alone),
            collectives.all_to_all(x, alone),
            collectives.scatter([x], x, world.rank, alone),
            collectives.gather(x, world.rank, alone)[0],  # type: ignore[index]
            collectives.all_gather_uneven(x, [2], alone)[0],
            collectives.reduce_scatter_uneven([x], alone),
            *collectives.all_gather_coalesced([x], alone).wait(),
        ]
        collectives.barrier(alone)
        assert collectives.all_gather_object("a", alone) == ["a"]
    assert record.counts() == {}
    assert alone.native is None
    for result in results:
        same(world, result, expected, "float32")
        assert world.platform.data_ptr(result) == world.platform.data_ptr(x)


@distributed(world_size=2)
def test_a_record_counts_kind_bytes_and_group_of_every_launch(world: World) -> None:
    platform = world.platform
    x = platform.zeros((4, 3), "float32", world.device)
    with record_collectives() as outer:
        collectives.all_reduce(x)
        with record_collectives() as inner:
            collectives.all_gather(x)
            collectives.reduce_scatter(x, async_op=True).wait()
        collectives.barrier()
    assert inner.counts() == {"all_gather": 1, "reduce_scatter": 1}
    assert outer.counts() == {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 1, "barrier": 1}
    assert [launch.nbytes for launch in outer.launches] == [48, 96, 48, 0]
    assert outer.nbytes("all_gather") == 96
    assert outer.nbytes() == 192
    assert all(launch.group is world.group for launch in outer.launches)
    assert "all_gather" in str(outer)
