"""Collectives that reduce, on every backend, against numpy: dtypes, groups of a mesh, sync and async, odd layouts and empty inputs."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from hp_platform import collectives
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from collective_values import (
    DTYPES,
    LAYOUTS,
    MOVES,
    WORLDS,
    groups,
    reduced,
    refused,
    run,
    same,
    shape_of,
    tensor,
    value,
)


def allowed_ops(world: World, dtype: str) -> tuple[str, ...]:
    if dtype == "bool":
        return ("max", "min")
    return (
        ("sum", "mean", "max", "min", "prod")
        if world.platform.is_floating(world.platform.dtype(dtype))
        else ("sum", "max", "min", "prod")
    )


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


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@distributed(world_size=WORLDS, backends=("torch", "cuda"))
def test_complex_numbers_are_added_and_averaged(world: World, dtype: str) -> None:
    for group in groups(world):
        numbers = np.arange(6.0 * group.size).reshape(2 * group.size, 3)
        arrays = [np.asarray(numbers + rank - 1j * numbers * (rank + 1), dtype) for rank in group.ranks]
        for op in ("sum", "mean"):
            # Whole numbers, but for the mean of three.
            whole = np.sum(arrays, 0) / (group.size if op == "mean" else 1)
            block = np.split(whole, group.size)[group.rank]
            for async_op in MOVES:
                x = world.platform.tensor(arrays[group.rank], dtype, world.device)
                blocks = [x[2 * r : 2 * r + 2] for r in range(group.size)]
                for expected, function, given in (
                    (whole, collectives.all_reduce, x),
                    (block, collectives.reduce_scatter, x),
                    (block, collectives.reduce_scatter_uneven, blocks),
                ):
                    found = world.platform.to_numpy(run(async_op, function, given, group, op))
                    assert found.dtype == dtype
                    np.testing.assert_allclose(found, expected, rtol=4 * np.finfo(dtype).eps)
            x = world.platform.tensor(arrays[group.rank], dtype, world.device)
            both = collectives.reduce_scatter_coalesced([x, 2.0 * x], group, op, async_op=False)
            for factor, found in enumerate(both, 1):
                np.testing.assert_allclose(
                    world.platform.to_numpy(found), factor * block, rtol=4 * np.finfo(dtype).eps
                )


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
