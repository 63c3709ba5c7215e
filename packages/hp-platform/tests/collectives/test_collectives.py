"""Collectives that move data, on every backend, against numpy: dtypes, groups of a mesh, sync and async, odd layouts and empty inputs."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from hp_platform import collectives
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from collective_values import DTYPES, LAYOUTS, MOVES, WORLDS, groups, run, same, shape_of, tensor, value


@pytest.mark.parametrize("dtype", DTYPES)
@distributed(world_size=WORLDS)
def test_all_gather_stacks_the_ranks(world: World, dtype: str) -> None:
    for group in groups(world):
        for layout in LAYOUTS:
            shape = shape_of(layout, 2)
            arrays = [value(rank, shape, dtype) for rank in group.ranks]
            for async_op in MOVES:
                x = tensor(world, arrays[group.rank], dtype, layout)
                same(
                    world,
                    run(async_op, collectives.all_gather, x, group),
                    np.concatenate(arrays),
                    dtype,
                )
                same(world, x, arrays[group.rank], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@distributed(world_size=WORLDS)
def test_all_gather_uneven_gives_every_ranks_tensor(world: World, dtype: str) -> None:
    for group in groups(world):
        for sizes in ([r % 3 for r in range(group.size)], [2] + [0] * (group.size - 1), [0] * group.size):
            arrays = [value(rank, (size, 3), dtype) for rank, size in zip(group.ranks, sizes, strict=True)]
            for async_op in MOVES:
                x = tensor(world, arrays[group.rank], dtype, "transposed")
                results = run(async_op, collectives.all_gather_uneven, x, sizes, group)
                assert len(results) == group.size
                for result, array in zip(results, arrays, strict=True):
                    same(world, result, array, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@distributed(world_size=WORLDS)
def test_broadcast_gives_every_rank_the_source(world: World, dtype: str) -> None:
    for group in groups(world):
        for layout in LAYOUTS:
            shape = shape_of(layout, 2)
            for src in {group.ranks[0], group.ranks[-1]}:
                for async_op in MOVES:
                    mine = value(group.global_rank, shape, dtype)
                    x = tensor(world, mine, dtype, layout)
                    result = run(async_op, collectives.broadcast, x, src, group)
                    same(world, result, value(src, shape, dtype), dtype)
                    same(world, x, mine, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@distributed(world_size=WORLDS)
def test_scatter_and_gather_go_between_one_rank_and_all(world: World, dtype: str) -> None:
    for group in groups(world):
        for layout in LAYOUTS:
            shape = shape_of(layout, 2)
            arrays = [value(rank, shape, dtype) for rank in group.ranks]
            root = group.ranks[-1]
            here = group.global_rank == root
            for async_op in MOVES:
                xs = [tensor(world, a, dtype, layout) for a in arrays] if here else None
                like = tensor(world, arrays[0], dtype)
                got = run(async_op, collectives.scatter, xs, like, root, group)
                same(world, got, arrays[group.rank], dtype)
                back = run(async_op, collectives.gather, got, root, group)
                assert (back is not None) == here
                for result, array in zip(back or [], arrays if here else [], strict=True):
                    same(world, result, array, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@distributed(world_size=WORLDS)
def test_all_to_all_exchanges_blocks(world: World, dtype: str) -> None:
    for group in groups(world):
        for layout in LAYOUTS:
            shape = shape_of(layout, 2 * group.size)
            arrays = [np.split(value(rank, shape, dtype), group.size) for rank in group.ranks]
            for async_op in MOVES:
                x = tensor(world, np.concatenate(arrays[group.rank]), dtype, layout)
                result = run(async_op, collectives.all_to_all, x, group)
                same(world, result, np.concatenate([blocks[group.rank] for blocks in arrays]), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@distributed(world_size=WORLDS)
def test_all_to_all_takes_blocks_of_any_size(world: World, dtype: str) -> None:
    for group in groups(world):
        sizes = [
            [(a + 2 * b) % 3 for b in range(group.size)] for a in range(group.size)
        ]  # sizes[from][to], zeros among them
        arrays = [
            [value(rank + b, (n, 3), dtype) for b, n in enumerate(sizes[a])]
            for a, rank in enumerate(group.ranks)
        ]
        mine = group.rank
        for async_op in MOVES:
            x = tensor(world, np.concatenate(arrays[mine]), dtype, "transposed")
            result = run(
                async_op,
                collectives.all_to_all,
                x,
                group,
                in_sizes=sizes[mine],
                out_sizes=[row[mine] for row in sizes],
            )
            same(world, result, np.concatenate([blocks[mine] for blocks in arrays]), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@distributed(world_size=WORLDS)
def test_point_to_point_moves_tensors_around_a_ring(world: World, dtype: str) -> None:
    for group in groups(world):
        place, n = group.rank, group.size
        if n == 1:
            continue  # nobody to send to: refused, see the wrong calls
        after, before = group.ranks[(place + 1) % n], group.ranks[(place - 1) % n]
        for layout in (*LAYOUTS, "number"):
            shape = () if layout == "number" else shape_of(layout, 2)
            x = tensor(world, value(world.rank, shape, dtype), dtype, layout)
            expected = value(before, shape, dtype)
            for async_op in MOVES:
                # Even ranks send first, so that a blocking send always has a receiver; of an odd number the last waits for the first.
                if place == 0 or (place % 2 == 0 and place != n - 1):
                    work = collectives.send(x, after, group, async_op=async_op)
                    got = run(async_op, collectives.recv, x, before, group)
                else:
                    got = run(async_op, collectives.recv, x, before, group)
                    work = collectives.send(x, after, group, async_op=async_op)
                if work is not None:
                    work.wait()
                same(world, got, expected, dtype)
            ops = [collectives.P2POp("send", x, after), collectives.P2POp("recv", x, before)]
            (got,) = collectives.batch_send_recv(ops, group).wait()
            same(world, got, expected, dtype)
            if dtype == "bool":
                continue  # refused, see the wrong calls
            rows = tensor(world, np.stack([expected] * 3), dtype)
            target = world.platform.reshape(world.platform.narrow(rows, 0, 1, 1), shape)
            world.platform.fill_(target, 0)
            ops = [
                collectives.P2POp("send", x, after),
                collectives.P2POp("recv", target, before, is_target=True),
            ]
            (got,) = collectives.batch_send_recv(ops, group).wait()
            assert world.platform.data_ptr(got) == world.platform.data_ptr(target)
            same(world, rows, np.stack([expected] * 3), dtype)


@distributed(world_size=(1, 3, 4))
def test_numbers_are_gathered_as_rows_of_one(world: World) -> None:
    x = tensor(world, value(world.rank, (), "float32"), "float32")
    expected = np.array([value(rank, (), "float32") for rank in range(world.size)])
    same(world, collectives.all_gather(x), expected, "float32")
    same(world, collectives.all_gather_coalesced([x]).wait()[0], expected, "float32")


@distributed(world_size=(1, 3, 4))
def test_objects_travel(world: World) -> None:
    for group in groups(world):
        mine = {"rank": world.rank, "text": "x" * world.rank}
        everyone = [{"rank": r, "text": "x" * r} for r in group.ranks]
        first, last = group.ranks[0], group.ranks[-1]
        assert collectives.all_gather_object(mine, group) == everyone
        assert collectives.broadcast_object(mine if world.rank == last else None, last, group) == everyone[-1]
        assert collectives.gather_object(mine, first, group) == (everyone if world.rank == first else None)
        sent = everyone if world.rank == first else None
        assert collectives.scatter_object(sent, first, group) == mine
