"""Every collective, on every backend, against numpy: dtypes, groups of a mesh, sync and async, non-contiguous and empty inputs.

Values are small integers, exact in every dtype and in any order of summation, so every comparison is bit-equal. The one
rounding is that of a mean over three ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hp_platform import ProcessGroup, collectives, group_of, init_device_mesh, record_collectives
from hp_platform.testing import World, distributed

DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool")
LAYOUTS = ("contiguous", "transposed", "empty", "vector")
MOVES = (False, True)
# 4 ranks make a 2x2 mesh with groups of 4 and 2; 3 ranks a 1x3 mesh with groups of 3 and 1.
WORLDS = (3, 4)


def groups(world: World) -> Iterator[ProcessGroup]:
    """The world, and the groups of a 2-D mesh that hold this rank."""
    rows = 2 if world.size == 4 else 1
    mesh = init_device_mesh(world.device_type, (rows, world.size // rows), mesh_dim_names=("row", "column"))
    assert world.group is not None
    yield world.group
    yield mesh.get_group("row")
    yield mesh.get_group("column")


def value(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """What a rank contributes, as the numpy dtype that represents ``dtype`` on the host."""
    numbers = (np.arange(int(np.prod(shape))).reshape(shape) % 3 + rank) % 4
    return (numbers % 2 == 1) if dtype == "bool" else numbers.astype(host(dtype))


def host(dtype: str) -> str:
    """numpy has no bfloat16; the platform hands it over as float32, exactly."""
    return "float32" if dtype == "bfloat16" else dtype


def shape_of(layout: str, rows: int) -> tuple[int, ...]:
    return {"contiguous": (rows, 3), "transposed": (rows, 3), "empty": (0, 3), "vector": (rows,)}[layout]


def tensor(world: World, array: np.ndarray, dtype: str, layout: str = "contiguous") -> Any:
    """The array on the device; ``transposed``: the same values behind a view that is not contiguous."""
    platform = world.platform
    if layout != "transposed":
        return platform.tensor(array, dtype, world.device)
    return platform.transpose(platform.tensor(np.ascontiguousarray(array.T), dtype, world.device), 0, 1)


def same(world: World, actual: Any, expected: np.ndarray, dtype: str) -> None:
    assert world.platform.dtype_name(actual.dtype) == dtype
    assert tuple(actual.shape) == expected.shape
    np.testing.assert_array_equal(world.platform.to_numpy(actual), expected)


def run(async_op: bool, collective: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """The result of a collective, by either way."""
    if not async_op:
        return collective(*arguments, **keywords, async_op=False)
    work = collective(*arguments, **keywords, async_op=True)
    first = work.wait()
    assert work.wait() is first
    assert work.is_completed()
    return first


NUMPY = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}


def reduced(op: str, arrays: list[np.ndarray], dtype: str) -> np.ndarray:
    if dtype == "bool":
        return np.any(arrays, 0) if op == "max" else np.all(arrays, 0)
    return NUMPY[op](np.stack(arrays).astype("float64"), axis=0).astype(host(dtype))


def allowed_ops(world: World, dtype: str) -> tuple[str, ...]:
    if dtype == "bool":
        return ("max", "min")
    return (
        ("sum", "mean", "max", "min", "prod")
        if world.platform.is_floating(world.platform.dtype(dtype))
        else ("sum", "max", "min", "prod")
    )


def refused(world: World, dtype: str) -> bool:
    """Whether this backend must refuse reductions of the dtype, and does, with a clear text."""
    platform = world.platform
    if platform.can_reduce(platform.dtype("uint8" if dtype == "bool" else dtype), world.device_type):
        return False
    assert dtype == "float64" and not platform.supports("reduce_float64", world.device_type)
    if world.size > 1:
        with pytest.raises(NotImplementedError, match="cannot reduce float64 on .*cast to float32"):
            collectives.all_reduce(tensor(world, value(0, (2,), dtype), dtype))
    return True


@pytest.mark.parametrize("dtype", DTYPES)
@distributed(world_size=WORLDS)
def test_all_reduce_gives_every_rank_the_reduction(world: World, dtype: str) -> None:
    if refused(world, dtype):
        return
    for group in groups(world):
        for layout in LAYOUTS:
            shape = shape_of(layout, 2)
            arrays = [value(rank, shape, dtype) for rank in group.ranks]
            for op in allowed_ops(world, dtype):
                if op == "mean" and layout == "empty":
                    continue  # numpy's mean over ranks of nothing is nothing too, but warns
                for async_op in MOVES:
                    x = tensor(world, arrays[group.rank], dtype, layout)
                    result = run(async_op, collectives.all_reduce, x, group, op)
                    if op == "mean" and group.size == 3:
                        expected = reduced(op, arrays, dtype)
                        # NCCL multiplies every contribution by 1/3 before it adds: a rounding each, and two of the sums.
                        ulp = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-24, "float64": 2**-53}[
                            dtype
                        ]
                        np.testing.assert_allclose(world.platform.to_numpy(result), expected, rtol=5 * ulp)
                    else:
                        same(world, result, reduced(op, arrays, dtype), dtype)
                    same(world, x, arrays[group.rank], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@distributed(world_size=WORLDS)
def test_reduce_scatter_gives_every_rank_its_block(world: World, dtype: str) -> None:
    if refused(world, dtype):
        return
    for group in groups(world):
        for layout in LAYOUTS:
            shape = shape_of(layout, 2 * group.size)
            arrays = [value(rank, shape, dtype) for rank in group.ranks]
            for op in allowed_ops(world, dtype):
                if op == "mean" and (layout == "empty" or group.size == 3):
                    continue  # numpy warns of the one, the other rounds: see all_reduce, and the mean of three below
                whole = reduced(op, arrays, dtype)
                block = np.split(whole, group.size)[group.rank]
                for async_op in MOVES:
                    x = tensor(world, arrays[group.rank], dtype, layout)
                    same(
                        world,
                        run(async_op, collectives.reduce_scatter, x, group, op),
                        block,
                        dtype,
                    )
                    same(world, x, arrays[group.rank], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@distributed(world_size=WORLDS)
def test_reduce_scatter_uneven_takes_blocks_of_any_size(world: World, dtype: str) -> None:
    if refused(world, dtype):
        return
    for group in groups(world):
        sizes = [(2 * r) % 3 for r in range(group.size)]  # 0, 2, 1, 0
        arrays = [
            [value(rank + 2 * b, (size, 3), dtype) for b, size in enumerate(sizes)] for rank in group.ranks
        ]
        for op in allowed_ops(world, dtype):
            if op == "mean":
                continue  # numpy warns of a mean of nothing; see the mean below
            expected = reduced(op, [blocks[group.rank] for blocks in arrays], dtype)
            for async_op in MOVES:
                xs = [tensor(world, block, dtype, "transposed") for block in arrays[group.rank]]
                same(
                    world,
                    run(async_op, collectives.reduce_scatter_uneven, xs, group, op),
                    expected,
                    dtype,
                )


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
def test_numbers_are_gathered_as_rows_of_one(world: World) -> None:
    x = tensor(world, value(world.rank, (), "float32"), "float32")
    expected = np.array([value(rank, (), "float32") for rank in range(world.size)])
    same(world, collectives.all_gather(x), expected, "float32")
    same(world, collectives.all_gather_coalesced([x]).wait()[0], expected, "float32")


@distributed(world_size=(1, 3, 4))
def test_means_of_blocks_divide_once(world: World) -> None:
    xs = [
        world.platform.full((1 + r % 2, 2), float(world.rank), device=world.device) for r in range(world.size)
    ]
    whole = world.platform.full((world.size, 2), float(world.rank), device=world.device)
    for result in (
        collectives.reduce_scatter_uneven(xs, op="mean"),
        collectives.reduce_scatter_uneven(xs, op="mean", async_op=True).wait(),
        collectives.reduce_scatter(whole, op="mean"),
        collectives.reduce_scatter(whole, op="mean", async_op=True).wait(),
    ):
        np.testing.assert_allclose(world.platform.to_numpy(result), (world.size - 1) / 2, rtol=2**-22)


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
