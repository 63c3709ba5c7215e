"""Coalesced collectives that fill given tensors: views of larger ones, blocks of the inputs, at once and behind a handle."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from hp_platform import ProcessGroup, collectives, group_of, record_collectives
from hp_platform.testing import World, distributed

EMPTY: list[tuple[int, ...]] = [(0, 2)]
LISTS: list[list[tuple[int, ...]]] = [[(2, 3), (1,), (0, 2), (3, 1)], [(2, 3)], EMPTY]
DTYPES = ("float32", "bfloat16", "int64", "bool")


def value(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """What a rank contributes: small whole numbers, exact in every dtype and order of summation."""
    numbers = (np.arange(int(np.prod(shape))).reshape(shape) % 3 + rank) % 4
    return numbers % 2 == 1 if dtype == "bool" else numbers


def views(world: World, shapes: list[tuple[int, ...]], dtype: str) -> tuple[Any, list[Any]]:
    """A larger tensor of zeros (of False), and contiguous views of it, one element apart."""
    platform, sizes = world.platform, [int(np.prod(s)) for s in shapes]
    base = platform.zeros((sum(sizes) + len(sizes),), dtype, world.device)
    rows = platform.split(base, [n for size in sizes for n in (1, size)])[1::2]
    return base, [platform.reshape(row, shape) for row, shape in zip(rows, shapes, strict=True)]


def filled(world: World, base: Any, arrays: list[np.ndarray]) -> None:
    """The views hold ``arrays``, and nothing was written between them."""
    expected = np.concatenate([part for a in arrays for part in (np.zeros(1, a.dtype), a.reshape(-1))])
    np.testing.assert_array_equal(world.platform.to_numpy(base), expected)


def groups(world: World) -> list[ProcessGroup]:
    """The world, and a group of this rank alone."""
    assert world.group is not None
    return [world.group, group_of([world.rank])]


def result_of(async_op: bool, made: Any) -> Any:
    return made.wait() if async_op else made


@pytest.mark.parametrize("async_op", [True, False])
@distributed(world_size=(1, 3))
def test_what_is_gathered_goes_into_views_of_a_larger_tensor(world: World, async_op: bool) -> None:
    for dtype, group, shapes in product(DTYPES, groups(world), LISTS):
        xs = [
            world.platform.tensor(value(world.rank + i, s, dtype), dtype, world.device)
            for i, s in enumerate(shapes)
        ]
        base, outs = views(world, [(group.size * s[0], *s[1:]) for s in shapes], dtype)
        with record_collectives() as record:
            made = collectives.all_gather_coalesced(xs, group, outs=outs, async_op=async_op)
            got = result_of(async_op, made)
        assert [id(x) for x in got] == [id(out) for out in outs]
        assert len(record.launches) == (1 if group.size > 1 and shapes != EMPTY else 0)
        expected = [
            np.concatenate([value(rank + i, s, dtype) for rank in group.ranks]) for i, s in enumerate(shapes)
        ]
        filled(world, base, expected)


@pytest.mark.parametrize("async_op", [True, False])
@distributed(world_size=(1, 3))
def test_what_is_reduced_goes_into_views_of_a_larger_tensor(world: World, async_op: bool) -> None:
    for dtype, group, shapes in product(DTYPES, groups(world), LISTS):
        op, reduction = ("max", np.any) if dtype == "bool" else ("sum", np.sum)
        wide = [(group.size * s[0], *s[1:]) for s in shapes]
        xs = [
            world.platform.tensor(value(world.rank + i, s, dtype), dtype, world.device)
            for i, s in enumerate(wide)
        ]
        base, outs = views(world, shapes, dtype)
        with record_collectives() as record:
            made = collectives.reduce_scatter_coalesced(xs, group, op, outs=outs, async_op=async_op)
            got = result_of(async_op, made)
        assert [id(x) for x in got] == [id(out) for out in outs]
        assert len(record.launches) == (1 if group.size > 1 and shapes != EMPTY else 0)
        whole = [
            reduction(np.stack([value(rank + i, s, dtype) for rank in group.ranks]), axis=0)
            for i, s in enumerate(wide)
        ]
        filled(world, base, [np.split(w, group.size)[group.rank] for w in whole])


@pytest.mark.parametrize("async_op", [True, False])
@distributed(world_size=(1, 2, 3))
def test_a_ranks_own_block_of_the_whole_is_gathered_and_reduced_in_place(
    world: World, async_op: bool
) -> None:
    platform, ranks = world.platform, np.arange(world.size)
    for count in (1, 2):
        wholes = [
            platform.full((2 * world.size, 3), world.rank + 1.0, device=world.device) for _ in range(count)
        ]
        blocks = [platform.narrow(whole, 0, 2 * world.rank, 2) for whole in wholes]
        made = collectives.all_gather_coalesced(blocks, outs=wholes, async_op=async_op)
        rows = np.repeat(ranks + 1.0, 2)[:, None] * np.ones(3)
        for whole in result_of(async_op, made):
            np.testing.assert_array_equal(platform.to_numpy(whole), rows)
        made = collectives.reduce_scatter_coalesced(wholes, op="mean", outs=blocks, async_op=async_op)
        for block in result_of(async_op, made):
            # The mean of three equal numbers: one division, of single precision.
            np.testing.assert_allclose(platform.to_numpy(block), rows[2 * world.rank :][:2], rtol=2**-22)


@distributed(world_size=2)
def test_a_list_of_nothing_needs_no_outs_and_no_launch(world: World) -> None:
    with record_collectives() as record:
        assert collectives.all_gather_coalesced([], outs=[]).wait() == []
        assert collectives.reduce_scatter_coalesced([], outs=[], async_op=False) == []
    assert record.counts() == {}


@distributed(world_size=(1, 2))
def test_without_a_handle_the_results_are_new_tensors_all_the_same(world: World) -> None:
    x = world.platform.full((world.size, 2), world.rank + 1.0, device=world.device)
    (whole,) = collectives.all_gather_coalesced([x], async_op=False)
    assert tuple(whole.shape) == (world.size**2, 2)
    (mine,) = collectives.reduce_scatter_coalesced([x], async_op=False)
    np.testing.assert_array_equal(world.platform.to_numpy(mine), [[world.size * (world.size + 1) / 2] * 2])


@distributed(world_size=(1, 2))
def test_outs_that_do_not_fit_are_refused(world: World) -> None:
    platform, n = world.platform, world.size
    x = platform.zeros((2 * n, 3), "float32", world.device)

    def made(shape: tuple[int, ...], dtype: str = "float32") -> Any:
        return platform.zeros(shape, dtype, world.device)

    scattered = platform.transpose(made((3, 2 * n * n)), 0, 1)
    for outs, told in (
        ([], r"outs needs one tensor per tensor of xs: got 0 for 1"),
        ([made((1, 3))], rf"outs\[0\] is \(1, 3\) float32 .*the result is \({2 * n * n}, 3\) float32"),
        ([made((2 * n * n, 3), "float16")], r"outs\[0\] is .* float16 on .*the result is .* float32 on"),
        ([scattered], r"outs\[0\] of shape .* is not contiguous: give a contiguous tensor"),
    ):
        with pytest.raises(ValueError, match=told):
            collectives.all_gather_coalesced([x], outs=outs)
    for outs, told in (
        ([made((2, 3))] * 2, r"outs needs one tensor per tensor of xs: got 2 for 1"),
        ([made((5, 3))], r"outs\[0\] is \(5, 3\) float32 .*the result is \(2, 3\) float32"),
        ([platform.transpose(made((3, 2)), 0, 1)], r"outs\[0\] of shape \(2, 3\) is not contiguous"),
    ):
        with pytest.raises(ValueError, match=told):
            collectives.reduce_scatter_coalesced([x], outs=outs)
