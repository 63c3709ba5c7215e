"""Texts that ranks tell each other when something is set up."""

import time
from datetime import timedelta

import pytest

from hp_platform.collectives import CollectiveTimeoutError
from hp_platform.group import ProcessGroup
from hp_platform.meeting import told
from hp_platform.subgroups import group_of
from hp_platform.testing import World, count_collectives, distributed


@distributed(world_size=3)
def test_every_rank_hears_every_text_by_rank_without_a_collective(world: World) -> None:
    with count_collectives() as counted:
        for number in range(3):
            time.sleep(0.01 * world.rank)
            texts = [f"{number} of {rank}" for rank in range(world.size)]
            assert told(f"{number} of {world.rank}", world.group) == texts
        assert told("", world.group) == [""] * world.size
    counted.assert_counts()


@distributed(world_size=3)
def test_groups_meet_on_their_own(world: World) -> None:
    ends = (0, world.size - 1)
    if world.rank in ends:
        assert told(str(world.rank), group_of(ends)) == [str(rank) for rank in ends]
    assert told(str(world.rank), world.group) == [str(rank) for rank in range(world.size)]


@distributed(world_size=2)
def test_a_rank_that_does_not_come_is_named(world: World) -> None:
    if world.rank == 0:
        usual, world.group.timeout = world.group.timeout, timedelta(seconds=0.2)
        with pytest.raises(
            CollectiveTimeoutError,
            match=r"rank 1 did not come to meeting number [0-9]+ of the .* within 0.2 s",
        ):
            told("here", world.group)
        world.group.timeout = usual
    else:
        time.sleep(0.4)
        assert told("late", world.group) == ["here", "late"]


@distributed(world_size=2)
def test_a_group_that_was_made_anew_hears_nothing_of_the_one_before(world: World) -> None:
    old = world.group
    assert told(f"old {world.rank}", old) == [f"old {rank}" for rank in range(world.size)]
    new = ProcessGroup(old.ranks, old.rank, old.backend, old.timeout, old.native)
    time.sleep(0.05 * world.rank)
    assert told(f"new {world.rank}", new) == [f"new {rank}" for rank in range(world.size)]
