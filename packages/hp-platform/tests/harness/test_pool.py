"""Pools with a world, on the backends of the run: what leaves ranks out of step is found, and told well."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hp_platform.launch import WorkerError, spawn
from hp_platform.testing import World, assert_parity, count_collectives, distributed, pool
from hp_platform.testing._remote import TestCall
from hp_platform.testing.backends import BACKENDS, select
from hp_platform.testing.pool import Pool, PoolCache, TestFailedError
from hp_platform.testing.strictness import Filters

sys.path.insert(0, str(Path(__file__).parent))
from processes import assert_gone

RUNNING = select(os.environ).running
OWN_ENDINGS = ("cuda", "npu")
"""Backends that fail on the device: their own error, or the stack at the moment when their watchdog aborts the process."""
BLOCKING = ("mindspore",)
"""Backends whose asynchronous collectives wait for their peers in tests (errors shall show where they happen)."""
EMPTY = b"\x80\x04}."
"""No arguments, pickled."""


# --- what runs on the workers


def all_reduce_everywhere(world: World) -> None:
    from hp_platform import collectives

    ones = world.platform.full((2, 3), 1.0, "float32", world.device)
    assert_parity(collectives.all_reduce(ones), ones * world.size, exact=True, name="sum")


def one_rank_starts_more(world: World) -> None:
    from hp_platform import collectives

    if world.rank == 1:
        collectives.all_reduce(world.platform.full((2,), 1.0, "float32", world.device), async_op=True)


def one_rank_meets_alone(world: World) -> None:
    """Goes below the recording, as a test that uses the framework's own collectives does."""
    if world.rank == 1:
        x = world.platform.full((1,), 1, "int64", world.device)
        world.platform.all_reduce_(x, "sum", world.group.native, True)


def one_rank_waits_for_ever(world: World) -> None:
    from hp_platform import collectives

    if world.rank == 1:
        total = collectives.all_reduce(world.platform.full((2,), 1.0, "float32", world.device))
        world.platform.to_numpy(total)  # waits for devices that work behind the host's back


def ranks_call_different_collectives(world: World) -> None:
    from hp_platform import collectives

    x = world.platform.full((4,), 1.0, "float32", world.device)
    result = collectives.all_gather(x) if world.rank == 0 else collectives.all_reduce(x)
    world.platform.to_numpy(result)


# --- the tests


@pytest.fixture(params=RUNNING)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def short_pool(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """Two workers whose collectives wait 4 seconds for their peers."""
    monkeypatch.setattr(pool, "COLLECTIVE_SECONDS", 4.0)
    made = Pool(backend, 2, init=True, filters=Filters(("error",)))
    yield made
    made.close()


def call(function: object, backend: str) -> TestCall:
    return TestCall(
        path=__file__,
        module=__name__,
        function=function.__name__,
        arguments=EMPTY,
        sys_path=tuple(sys.path),
        backend=backend,
        filters=Filters(("error",)),
    )


@pytest.mark.once
def test_a_rank_that_started_more_is_found_after_the_test(short_pool: Pool, backend: str) -> None:
    short_pool.run(call(all_reduce_everywhere, backend), timeout=60)
    with pytest.raises(TestFailedError) as error:
        short_pool.run(call(one_rank_starts_more, backend), timeout=60)
    if backend in BLOCKING:
        assert str(error.value).startswith(
            "rank 1 of 2 failed with CollectiveTimeoutError: all_reduce number "
        )
    else:
        assert str(error.value) == (
            "the test passed on every rank but left them out of step:\non the group of ranks 0, 1, collective number 1 of the "
            "test is missing on rank 0 and all_reduce on rank 1"
        )
    assert not short_pool.is_alive
    assert_gone(short_pool.pids, 0)


@pytest.mark.once
def test_a_collective_below_the_recording_is_found_after_the_test(
    short_pool: Pool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MEET_SECONDS", 1.0)
    told = (
        "rank 1 of 2 failed"
        if backend in BLOCKING
        else "the test passed on every rank but left them out of step: a "
    )
    with pytest.raises(TestFailedError, match=told):
        short_pool.run(call(one_rank_meets_alone, backend), timeout=60)
    assert not short_pool.is_alive


def test_a_hang_in_a_collective_names_rank_collective_and_line(short_pool: Pool, backend: str) -> None:
    short_pool.run(
        call(all_reduce_everywhere, backend), timeout=60
    )  # the workers have imported this file after that
    with pytest.raises(TestFailedError) as error:
        short_pool.run(call(one_rank_waits_for_ever, backend), timeout=1.5)
    text = str(error.value)
    assert text.startswith("rank 1 of 2 did not finish within 1.5 s")
    assert re.search(r"last collective: all_reduce number \d+ on group of 2 \(ranks 0, 1\)", text)
    assert "in one_rank_waits_for_ever" in text
    assert "rank 0 had returned" in text


def test_mismatched_collectives_end_with_both_names(short_pool: Pool, backend: str) -> None:
    with pytest.raises(TestFailedError) as error:
        short_pool.run(call(ranks_call_different_collectives, backend), timeout=60)
    text = str(error.value)
    assert "in ranks_call_different_collectives" in text
    if backend not in OWN_ENDINGS:
        assert re.search(r"all_(reduce|gather) number \d+ on the group of 2 \(ranks 0, 1\)", text)
        assert "all_gather" in text
        assert "all_reduce" in text


@pytest.mark.once
def test_at_most_so_many_pools_idle_and_the_longest_unused_goes_first() -> None:
    cache = PoolCache(max_idle=2)
    try:
        first = cache.get("plain", 1, Filters())
        second = cache.get("plain", 2, Filters())
        assert cache.get("plain", 1, Filters()) is first
        third = cache.get("plain", 3, Filters())
        assert (first.is_alive, second.is_alive, third.is_alive) == (True, False, True)
        assert_gone(second.pids, 0)
    finally:
        cache.close()
    assert_gone(first.pids + third.pids, 0)


def test_spawned_functions_join_a_world_on_their_device(backend: str) -> None:
    def sum_of_ranks(device_type: str) -> tuple[str, float]:
        from hp_platform import collectives, get_platform, process_groups

        platform = get_platform()
        device = platform.device(device_type).current()
        process_groups.init_process_group(device_id=device)
        x = platform.full((1,), float(process_groups.get_rank()), "float32", device)
        return device, float(platform.to_numpy(collectives.all_reduce(x))[0])

    kind = BACKENDS[backend]
    results = spawn(
        sum_of_ranks, 2, kind.device_type, args=(kind.device_type,), env=kind.environment, timeout=120
    )
    assert [total for _, total in results] == [1.0, 1.0]
    assert [device.partition(":")[0] for device, _ in results] == [kind.device_type] * 2


def test_an_unknown_device_is_refused_by_the_worker(backend: str) -> None:
    with pytest.raises(WorkerError, match="rank 0 of 1 failed with ValueError: .*'tpu'"):
        spawn(os.getpid, 1, "tpu", env=BACKENDS[backend].environment)


@distributed((1, 2, 4), timeout=120)
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_workers_join_a_world_and_count_collectives(world: World, factor: float) -> None:
    from hp_platform import collectives

    assert world.group.size == world.size
    assert world.group.rank == world.rank
    assert world.device.startswith(world.device_type)
    x = world.platform.full((3,), factor * (world.rank + 1), "float32", world.device)
    with count_collectives() as counted:
        total = collectives.all_reduce(x)
    expected = factor * sum(range(1, world.size + 1))
    assert_parity(
        total, world.platform.full((3,), expected, "float32", world.device), exact=True, name="total"
    )
    counted.assert_counts(all_reduce=1 if world.size > 1 else 0)
    assert counted.nbytes() == (12 if world.size > 1 else 0)


@pytest.mark.once
@distributed(2)
def test_counting_tells_what_was_expected_and_what_came(world: World) -> None:
    from hp_platform import collectives

    with count_collectives() as counted:
        collectives.all_reduce(world.platform.full((3,), 1.0, "float32", world.device))
    with pytest.raises(
        AssertionError, match="expected 2 all_gather, but this rank started 1 all_reduce:\nall_reduce "
    ):
        counted.assert_counts(all_gather=2)
    with pytest.raises(AssertionError, match="expected no collective, but this rank started 1 all_reduce"):
        counted.assert_counts()
    with pytest.raises(ValueError, match="no collective is called all_reduced"):
        counted.assert_counts(all_reduced=1)


@distributed(2)
def test_parity_compares_tensors_of_the_platform(world: World) -> None:
    platform = world.platform
    x = platform.full((2, 2), 1.5, "bfloat16", world.device)
    assert_parity(x, platform.full((2, 2), 1.5, "bfloat16", world.device), exact=True)
    with pytest.raises(
        AssertionError, match=r"dtypes differ: actual bfloat16\[2, 2\], expected float32\[2, 2\]"
    ):
        assert_parity(x, platform.full((2, 2), 1.5, "float32", world.device), exact=True)


@pytest.mark.once
@distributed(2, init=False)
def test_without_init_there_is_no_world(world: World) -> None:
    from hp_platform import process_groups

    assert world.group is None
    assert not process_groups.is_initialized()
    process_groups.init_process_group(device_id=world.device)
    assert process_groups.get_world_size() == world.size
    process_groups.destroy_process_group()
