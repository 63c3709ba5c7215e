"""What is particular to MindSpore's collectives on CPU: their composition, their order, their errors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import hp_platform
from hp_platform import CollectiveTimeoutError, collectives
from hp_platform.launch import spawn
from hp_platform.testing import World, distributed

MINDSPORE = ("mindspore",)


def numbers(world: World, rank: int, dtype: str, shape: tuple[int, ...] = (2, 3)) -> np.ndarray:
    """Small integers that differ by rank, as the platform hands them over."""
    values = np.arange(int(np.prod(shape))).reshape(shape) % 2 + rank
    return world.platform.to_numpy(world.platform.tensor(values, dtype))


@distributed(2, backends=MINDSPORE)
@pytest.mark.parametrize(
    "dtype", ["int16", "uint16", "uint32", "uint64", "int8", "bool", "complex64", "complex128"]
)
def test_dtypes_without_kernels_travel_as_bits(world: World, dtype: str) -> None:
    platform, group = world.platform, world.group.native
    mine, other = (platform.tensor(numbers(world, r, dtype), dtype) for r in (world.rank, 1 - world.rank))
    both = [numbers(world, 0, dtype), numbers(world, 1, dtype)]
    out = platform.zeros((4, 3), dtype)
    platform.all_gather_into(out, mine, group, False)
    np.testing.assert_array_equal(platform.to_numpy(out), np.concatenate(both))
    platform.all_to_all_into(out, platform.cat([mine, other]), [2, 2], [2, 2], group, False)
    np.testing.assert_array_equal(
        platform.to_numpy(out), np.concatenate([both[world.rank], both[1 - world.rank]])
    )
    sent = platform.clone(mine)
    platform.broadcast_(sent, 1, group, False)
    np.testing.assert_array_equal(platform.to_numpy(sent), both[1])
    work = platform.send(mine, 1 - world.rank, group, True)
    platform.recv_(sent, 1 - world.rank, group, False)
    work.wait()
    np.testing.assert_array_equal(platform.to_numpy(sent), both[1 - world.rank])


@distributed(2, backends=MINDSPORE)
def test_collectives_do_not_take_the_message_of_an_earlier_send(world: World) -> None:
    platform, group = world.platform, world.group.native
    x, y = platform.full((3,), 1.0), platform.full((3,), 7.0)
    sizes = [1, 2] if world.rank == 0 else [2, 1]
    if world.rank == 0:
        platform.send(x, 1, group, True)
    for collective in (
        lambda: platform.broadcast_(y, 0, group, False),
        lambda: platform.scatter_into(y, [y, y] if world.rank == 0 else None, 0, group, False),
        lambda: platform.reduce_scatter_into(y, platform.full((6,), 3.5), "sum", group, False),
        lambda: platform.all_to_all_into(y, platform.full((3,), 7.0), sizes, sizes, group, False),
    ):
        collective()
        assert platform.to_numpy(y).tolist() == [7.0] * 3
    if world.rank == 1:
        platform.recv_(y, 0, group, False)
        assert platform.to_numpy(y).tolist() == [1.0] * 3


@distributed(2, backends=MINDSPORE)
def test_receives_posted_before_sends_do_not_block_them(world: World) -> None:
    platform, group, peer = world.platform, world.group.native, 1 - world.rank
    first, second = platform.zeros((2,)), platform.zeros((3,))
    works = [platform.recv_(first, peer, group, True), platform.recv_(second, peer, group, True)]
    works = works + [
        platform.send(platform.full((n,), float(n + world.rank)), peer, group, True) for n in (2, 3)
    ]
    # The later one is waited for first: it must not take the earlier message.
    for work in (works[1], works[0], works[2], works[3]):
        work.wait()
        assert work.is_completed()
    assert platform.to_numpy(first).tolist() == [2.0 + peer] * 2
    assert platform.to_numpy(second).tolist() == [3.0 + peer] * 3


@distributed(2, backends=MINDSPORE)
@pytest.mark.parametrize("async_op", [False, True])
def test_results_are_written_into_part_of_a_larger_tensor(world: World, async_op: bool) -> None:
    platform, group = world.platform, world.group.native
    for dtype in ("float32", "float64", "bfloat16"):
        base = platform.zeros((6, 2), dtype)
        part = platform.narrow(base, 0, 1, 4)
        mine = platform.full((2, 2), world.rank + 1, dtype)
        for start in (
            lambda part=part, mine=mine: platform.all_gather_into(part, mine, group, async_op),
            lambda part=part: platform.all_reduce_(part, "sum", group, async_op),
        ):
            work = start()
            if work is not None:
                work.wait()
        rows = [0.0, 2.0, 2.0, 4.0, 4.0, 0.0]
        assert platform.to_numpy(base).tolist() == [[row] * 2 for row in rows]


@distributed(2, backends=MINDSPORE)
def test_float64_is_summed_in_the_order_of_ranks(world: World) -> None:
    platform = world.platform
    values = [1.0 / 3.0, 1e-17]
    x = platform.full((1,), values[world.rank], "float64")
    total = collectives.all_reduce(x)
    assert platform.to_numpy(total).tolist() == [values[0] + values[1]]
    assert platform.to_numpy(x).tolist() == [values[world.rank]]


@distributed(2, backends=MINDSPORE)
def test_sizes_that_do_not_agree_are_refused_by_all_ranks_together(world: World) -> None:
    platform, group = world.platform, world.group.native
    sizes = [1, 2] if world.rank == 0 else [1, 1]
    with pytest.raises(ValueError, match="rank 0 of the group sends 2 rows to rank 1, which expects 1"):
        platform.all_to_all_into(
            platform.zeros((2, 3)), platform.zeros((sum(sizes), 3)), [1, 1], sizes, group, False
        )
    collectives.barrier()


@distributed(2, init=False, backends=MINDSPORE)
def test_ranks_with_tensors_of_other_sizes_are_told(world: World) -> None:
    hp_platform.init_process_group(timeout=timedelta(seconds=3))
    with pytest.raises((CollectiveTimeoutError, RuntimeError)):
        world.platform.to_numpy(collectives.all_reduce(world.platform.zeros((4 + 4 * world.rank,))))


@distributed(2, init=False, backends=MINDSPORE)
def test_a_world_can_be_ended_and_taken_up_again(world: World) -> None:
    platform = world.platform
    for turn in range(3):
        hp_platform.init_process_group(timeout=timedelta(seconds=20))
        store = hp_platform.get_world().tables.store
        assert platform.store_get(store, "turn") is None
        collectives.barrier()
        if world.rank == 1:
            platform.store_set(store, "turn", bytes([turn, 0]))
        collectives.barrier()
        assert platform.store_get(store, "turn") == bytes([turn, 0])
        assert platform.to_numpy(collectives.all_reduce(platform.full((2,), 1.0))).tolist() == [2.0, 2.0]
        hp_platform.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"rank [01] of 2 before, and MindSpore joins one per process"):
        hp_platform.init_process_group(rank=0, world_size=3)


@distributed(4, min_world_size=4, backends=MINDSPORE)
def test_rows_and_columns_of_four_ranks_communicate_at_once(world: World) -> None:
    platform, mesh = (
        world.platform,
        hp_platform.init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column")),
    )
    for dtype in ("float32", "float64", "int64"):
        x = platform.full((3,), world.rank + 1, dtype)
        works = [
            (name, collectives.all_reduce(x, mesh.get_group(name), async_op=True))
            for name in ("row", "column")
        ]
        for name, work in works:
            members = mesh.get_group(name).ranks
            assert platform.to_numpy(work.wait()).tolist() == [sum(members) + 2] * 3
        gathered = collectives.all_gather_uneven(platform.full((world.rank,), world.rank, dtype), range(4))
        assert [platform.to_numpy(piece).tolist() for piece in gathered] == [[r] * r for r in range(4)]


def test_programs_that_run_ahead_of_the_device_get_the_same_results(platform: Any) -> None:
    """As a user's program runs: operations are queued, nothing blocks."""

    def job() -> list[Any]:
        import hp_platform
        from hp_platform import collectives

        platform = hp_platform.get_platform()
        hp_platform.init_process_group()
        rank = hp_platform.get_rank()
        x = platform.full((200, 200), 1.0, "float64")
        found = []
        for _ in range(10):
            weight = platform.parameter(platform.full((200, 200), 0.5 + rank, "float64"))
            y = platform.matmul(platform.matmul(x, weight), weight)
            platform.backward([platform.mean(y)])
            grad = platform.get_grad(weight)
            works = [collectives.all_reduce(g, async_op=True) for g in (grad, platform.cast(grad, "float32"))]
            gathered = collectives.all_gather(platform.narrow(grad, 0, rank, 1))
            platform.add_(weight, works[0].wait(), alpha=-1.0)
            found.append([float(platform.to_numpy(v).sum()) for v in (weight, works[1].wait(), gathered)])
        hp_platform.destroy_process_group()
        return found

    env = {"HYPER_PARALLEL_PLATFORM": "mindspore"}
    results = spawn(job, 2, env=env, timeout=60)
    # d mean(x w w) / dw = (x^T g w^T + (x w)^T g) with g = 1/40000: each entry is w + w, over 200 columns of 1/200.
    summed = 2 * 0.5 + 2 * 1.5
    for rank, found in enumerate(results):
        expected = [(0.5 + rank - summed) * 40000, summed * 40000, 0.0]
        for weight, total, gathered in found:
            np.testing.assert_allclose([weight, total], expected[:2], rtol=1e-6)
            np.testing.assert_allclose(gathered, (1.0 + 3.0) * 200, rtol=1e-6)
