"""Maximum and minimum over ranks with NaN, infinities and signed zeros: as on one device, whichever rank has them."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from hp_platform import collectives
from hp_platform.testing import World, distributed

NAN, INF = float("nan"), float("inf")
DTYPES = ("float32", "float64", "bfloat16", "float16")
# Exact in every one of these dtypes; the last is subnormal in float16.
NUMBERS = (-INF, -2.5, -1.0, -0.0, 0.0, 0.5, 3.0, INF, 2.0**-20)


def columns(size: int) -> np.ndarray:
    """(size, n): what each rank has. NaN on each rank alone, on all but one, on all; and numbers in every order."""
    found = []
    for shift in range(len(NUMBERS)):
        numbers = [NUMBERS[(shift + 2 * rank) % len(NUMBERS)] for rank in range(size)]
        found.append(numbers)
        for rank in range(size):
            alone = list(numbers)
            alone[rank] = NAN if shift % 2 else -NAN
            found.append(alone)
            found.append([numbers[r] if r == rank else NAN for r in range(size)])
    return np.array([*found, [NAN] * size, [-INF] * size, [INF] * size, [-0.0] * size]).T


def cases(world: World) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """Dtype, operation, what the ranks have as (ranks, n), and what they must give as (n,)."""
    values = columns(world.size)
    for dtype in DTYPES:
        # test_collectives shows that and how a dtype is refused.
        if world.platform.can_reduce(world.platform.dtype(dtype), world.device_type):
            yield dtype, "max", values, values.max(0)
            yield dtype, "min", values, values.min(0)


def same(world: World, found: Any, expected: np.ndarray, label: str) -> None:
    np.testing.assert_array_equal(world.platform.to_numpy(found), expected, err_msg=label)


def finished(x: Any, async_op: bool) -> Any:
    return x.wait() if async_op else x


@distributed(world_size=(2, 3, 4))
def test_nan_on_any_rank_is_the_maximum_and_the_minimum(world: World) -> None:
    platform = world.platform
    for dtype, op, values, expected in cases(world):
        mine = platform.tensor(values[world.rank], dtype, world.device)
        for async_op in (False, True):
            found = finished(collectives.all_reduce(mine, None, op, async_op=async_op), async_op)  # type: ignore[call-overload]
            same(world, found, expected, f"all_reduce {op} of {dtype}")
            assert np.signbit(platform.to_numpy(found))[-1], f"{op} of {dtype} -0.0"
            assert platform.dtype_name(found.dtype) == dtype
        same(world, mine, values[world.rank], "the input stays")
        collectives.all_reduce(mine, None, op, out=mine)
        same(world, mine, expected, f"all_reduce {op} of {dtype} in place")
        scalar = platform.tensor(values[world.rank, 1], dtype, world.device)
        same(world, collectives.all_reduce(scalar, None, op), expected[1], f"{op} of a {dtype} scalar")


@distributed(world_size=(2, 3, 4))
def test_nan_on_any_rank_reaches_the_block_that_it_is_in(world: World) -> None:
    platform = world.platform
    for dtype, op, values, expected in cases(world):
        rows = values.shape[1] // world.size
        mine = platform.tensor(values[world.rank, : rows * world.size], dtype, world.device)
        block = expected[world.rank * rows : (world.rank + 1) * rows]
        for async_op in (False, True):
            found = finished(collectives.reduce_scatter(mine, None, op, async_op=async_op), async_op)  # type: ignore[call-overload]
            same(world, found, block, f"reduce_scatter {op} of {dtype}")
        ends = np.cumsum([0, *[0, 2, 1, rows][: world.size]])
        blocks = [
            platform.tensor(values[world.rank, a:b], dtype, world.device) for a, b in itertools.pairwise(ends)
        ]
        found = collectives.reduce_scatter_uneven(blocks, None, op)
        same(world, found, expected[ends[world.rank] : ends[world.rank + 1]], f"uneven {op} of {dtype}")


@distributed(world_size=3)
def test_nan_on_any_rank_is_kept_by_coalesced_reductions(world: World) -> None:
    platform = world.platform
    for dtype, op, values, expected in cases(world):
        rows = values.shape[1] // world.size
        xs = [platform.tensor(values[world.rank, : world.size * n], dtype, world.device) for n in (rows, 2)]
        found = collectives.all_reduce_coalesced(xs, None, op).wait()
        blocks = collectives.reduce_scatter_coalesced(xs, None, op).wait()
        for whole, block, n in zip(found, blocks, (rows, 2), strict=True):
            same(world, whole, expected[: world.size * n], f"all_reduce {op} of {dtype}")
            mine = expected[world.rank * n : (world.rank + 1) * n]
            same(world, block, mine, f"reduce_scatter {op} of {dtype}")


@distributed(2)
def test_the_maximum_of_whole_numbers_that_no_float_holds_is_exact(world: World) -> None:
    numbers = np.array([[2**62 + 1, -(2**63)], [2**62, 2**63 - 1]])
    mine = world.platform.tensor(numbers[world.rank], "int64", world.device)
    same(world, collectives.all_reduce(mine, None, "max"), numbers.max(0), "max of int64")
