"""A collective that a peer does not join ends with the collective's name and the rank that is missing."""

from __future__ import annotations

import io
import sys
import time
from datetime import timedelta

import pytest

import hp_platform
from hp_platform import CollectiveTimeoutError, collectives, diagnosis
from hp_platform.testing import World, distributed

SECONDS = 2
# On npu and cuda the backend's own watchdog ends the process at a time-out; it cannot be caught.
CATCHABLE = ("torch", "mindspore")


def _join(world: World) -> None:
    hp_platform.init_process_group(timeout=timedelta(seconds=SECONDS))
    collectives.all_reduce(world.platform.zeros((3,)))


def _stay_away(world: World) -> None:
    """Alive, and elsewhere, until another rank has seen enough."""
    tables, deadline = hp_platform.get_world().tables, time.monotonic() + 30
    assert tables is not None
    while world.platform.store_get(tables.store, "seen") is None and time.monotonic() < deadline:
        time.sleep(0.1)


def _seen(world: World) -> None:
    tables = hp_platform.get_world().tables
    assert tables is not None
    world.platform.store_set(tables.store, "seen", b"yes")


@distributed(world_size=2, init=False, backends=CATCHABLE)
def test_a_rank_that_does_not_come_is_named_before_and_at_the_time_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    _join(world)
    if world.rank == 1:
        _stay_away(world)
        assert said.getvalue() == ""
        return
    begun = time.monotonic()
    with pytest.raises(CollectiveTimeoutError) as caught:
        world.platform.to_numpy(collectives.all_gather(world.platform.zeros((4,)), async_op=True).wait())
    assert SECONDS - 1 < time.monotonic() - begun < SECONDS + 5
    _seen(world)
    first, *others = str(caught.value).splitlines()
    assert first.startswith(
        "all_gather number 2 on the group of 2 (ranks 0, 1), 32 bytes was not joined by every rank within 2 s"
    )
    assert others == ["rank 1 has not come: the last it started on this group is all_reduce number 1"]
    waiting, *named = said.getvalue().splitlines()
    assert waiting.startswith("rank 0 has been waiting for ")
    assert waiting.endswith("s in all_gather number 2 on the group of 2 (ranks 0, 1) (time-out 2 s):")
    assert named == ["rank 1 has not come: the last it reported on this group is all_reduce number 1"]


@distributed(world_size=2, init=False, backends=CATCHABLE)
def test_a_rank_in_another_collective_is_named(world: World) -> None:
    _join(world)
    call = collectives.all_reduce if world.rank == 0 else collectives.all_gather
    other = "all_gather" if world.rank == 0 else "all_reduce"
    with pytest.raises(RuntimeError) as caught:  # one rank may see the other's end of the connection first
        world.platform.to_numpy(call(world.platform.zeros((4,))))
    text = str(caught.value)
    named = (
        f"rank {1 - world.rank} is out of step: it called {other} where this rank called {call.__name__}"
        in text
    )
    tables = hp_platform.get_world().tables
    assert tables is not None
    world.platform.store_set(tables.store, f"named/{world.rank}", b"yes" if named else b"no")
    deadline = time.monotonic() + 3 * SECONDS
    answers: list[bytes | None] = [None, None]
    while None in answers and time.monotonic() < deadline:
        answers = [world.platform.store_get(tables.store, f"named/{rank}") for rank in range(2)]
        time.sleep(0.05)
    assert b"yes" in answers, text


@distributed(world_size=2, init=False, backends=("cuda", "npu"))
def test_a_rank_that_waits_says_for_whom_before_the_time_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "PATIENCE", 0.1)
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    hp_platform.init_process_group(timeout=timedelta(seconds=20))
    x = world.platform.zeros((3,), device=world.device)
    collectives.all_reduce(x)
    world.platform.to_numpy(x)
    if world.rank == 1:
        time.sleep(4)
    result = collectives.all_reduce(x + 1)
    assert world.platform.to_numpy(result).tolist() == [2.0, 2.0, 2.0]
    if world.rank == 0:
        first, second = said.getvalue().splitlines()
        assert first.startswith("rank 0 has been waiting for ")
        assert first.endswith("s in all_reduce number 2 on the group of 2 (ranks 0, 1) (time-out 20 s):")
        assert second == "rank 1 has not come: the last it reported on this group is all_reduce number 1"
    else:
        assert said.getvalue() == ""


@distributed(world_size=3, min_world_size=3)
def test_transfers_between_two_ranks_do_not_put_the_third_out_of_step(world: World) -> None:
    x = world.platform.zeros((2,), device=world.device)
    before = hp_platform.get_world().num_launches
    if world.rank == 0:
        collectives.send(x, 1)
    if world.rank == 1:
        collectives.recv(x, 0)
    assert hp_platform.get_world().num_launches == before
    collectives.barrier()
    assert hp_platform.get_world().num_launches == before + 1


@distributed(world_size=3, init=False, backends="torch")
def test_a_rank_whose_heart_stops_is_named(world: World) -> None:
    _join(world)
    if world.rank == 2:
        hp_platform.get_world().tables.diagnosis.stop()  # type: ignore[union-attr]  # as a dead process: no more heartbeats
        _stay_away(world)
        return
    with pytest.raises(
        CollectiveTimeoutError, match=r"rank 2 no longer answers \(its process is gone or stopped\)"
    ):
        collectives.barrier()
    _seen(world)


@distributed(world_size=2, init=False, backends="torch")
def test_of_a_rank_that_is_gone_is_said_what_it_has_reported(world: World) -> None:
    _join(world)
    publisher, group = hp_platform.get_world().tables.diagnosis, hp_platform.get_world()  # type: ignore[union-attr]
    if world.rank == 1:
        publisher.stop()
        collectives.barrier()  # after its last report
        _stay_away(world)
        return
    collectives.barrier()
    with pytest.raises(CollectiveTimeoutError) as caught:
        collectives.barrier()
    _seen(world)
    (line,) = str(caught.value).splitlines()[1:]
    assert line.startswith("rank 1 no longer answers (its process is gone or stopped); ")
    assert line.endswith(
        ("the last it reported on this group is all_reduce number 1", "it has reported nothing on this group")
    )
    assert group.num_launches == 3


@distributed(world_size=2, init=False, backends="torch")
def test_a_world_that_the_user_made_says_its_own_time_out(world: World) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    hp_platform.init_process_group()
    assert hp_platform.get_world().timeout == timedelta(seconds=SECONDS)
    theirs = dist.new_group([0, 1], timeout=timedelta(seconds=7))
    hp_platform.mark_created_groups(theirs)
    assert hp_platform.group_of([0, 1]).timeout == timedelta(seconds=7)
    if world.rank == 1:
        _stay_away(world)
        return
    with pytest.raises(CollectiveTimeoutError, match="was not joined by every rank within 2 s"):
        collectives.barrier(hp_platform.get_world())
    _seen(world)


@distributed(world_size=3, min_world_size=3, init=False, backends="torch")
def test_a_group_for_which_not_all_members_ask_is_named(world: World) -> None:
    _join(world)
    if world.rank != 1:
        _stay_away(world)
        return
    with pytest.raises(
        CollectiveTimeoutError,
        match=r"rank 1 asked for the group of 2 \(ranks 1, 2\), and not every other one of them did within 2 s",
    ):
        hp_platform.group_of([1, 2])
    _seen(world)
    assert (1, 2) not in hp_platform.get_world().tables.groups  # type: ignore[union-attr]
