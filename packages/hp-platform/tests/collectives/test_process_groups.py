"""Process groups: found again by their ranks, split, adopted, ended."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest

import hp_platform
from hp_platform import collectives
from hp_platform.testing import World, distributed


def _sum_of_ranks(world: World, group: hp_platform.ProcessGroup) -> float:
    x = world.platform.full((1,), float(world.rank), device=world.device)
    return float(world.platform.to_numpy(collectives.all_reduce(x, group))[0])


@distributed(world_size=(1, 3, 4))
def test_the_world_knows_itself(world: World) -> None:
    group = hp_platform.get_world()
    assert group is world.group
    assert group.ranks == tuple(range(world.size))
    assert hp_platform.get_rank() == group.rank == group.global_rank == world.rank
    assert hp_platform.get_world_size() == group.size == world.size
    assert hp_platform.get_process_group_ranks() == list(range(world.size))
    assert hp_platform.get_group_local_rank() == world.rank
    assert world.platform.device(world.device_type).comm_backend in hp_platform.get_backend()


@distributed(world_size=4)
def test_the_same_ranks_in_any_order_are_the_same_group(world: World) -> None:
    everyone = list(range(world.size))
    assert hp_platform.group_of(everyone[::-1]) is world.group
    assert hp_platform.create_group(everyone) is world.group
    half = [r for r in everyone if r % 2 == world.rank % 2]
    group = hp_platform.group_of(half)
    assert hp_platform.group_of(half[::-1]) is group
    assert group.ranks == tuple(half)
    assert _sum_of_ranks(world, group) == sum(half)


@distributed(world_size=4)
def test_split_group_gives_the_part_that_holds_this_rank(world: World) -> None:
    first, rest = [0], list(range(1, world.size))
    part = hp_platform.split_group(split_ranks=[first, rest])
    assert part is not None
    assert part.ranks == tuple(first if world.rank == 0 else rest)
    assert _sum_of_ranks(world, part) == sum(part.ranks)
    assert (hp_platform.split_group(split_ranks=[[0]]) is None) == (world.rank != 0)


@distributed(world_size=3, min_world_size=3)
def test_members_may_have_made_different_numbers_of_groups_before(world: World) -> None:
    if world.rank < 2:
        assert _sum_of_ranks(world, hp_platform.group_of([0, 1])) == 1
    if world.rank > 0:
        assert _sum_of_ranks(world, hp_platform.group_of([1, 2])) == 3
    if world.rank != 1:
        assert _sum_of_ranks(world, hp_platform.group_of([0, 2])) == 2


@distributed(world_size=2, isolated=True)
def test_groups_that_the_framework_made_are_adopted(world: World) -> None:
    native = world.platform.new_group((0, 1), timedelta(seconds=30))
    tables = hp_platform.get_world().tables
    assert tables is not None
    hp_platform.mark_created_groups([native])
    marked = tables.groups[(0, 1)]
    assert marked.native is native
    assert hp_platform.group_of([1, 0]) is marked
    assert _sum_of_ranks(world, marked) == 1.0


@distributed(world_size=2)
def test_a_group_whose_ranks_do_not_ascend_is_not_adopted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(world.platform), "native_ranks", lambda platform, group: (1, 0))
    with pytest.raises(
        ValueError, match=r"the group's ranks are \[1, 0\], in this order; make it with ascending ranks"
    ):
        hp_platform.mark_created_groups([object()])
    assert hp_platform.group_of([0, 1]) is world.group


@distributed(world_size=2, init=False, isolated=True)
def test_a_mesh_that_makes_the_world_leaves_every_rank_its_own_device(world: World) -> None:
    handle = world.platform.device(world.device_type)
    handle.set_current(0)  # as in a program that has chosen none
    hp_platform.init_device_mesh(world.device_type, (2,)).get_group()
    expected = f"{world.device_type}:{world.rank}" if handle.count() > 1 else handle.current()
    assert handle.current() == expected
    x = world.platform.full((1,), 1.0, device=handle.current())
    assert float(world.platform.to_numpy(collectives.all_reduce(x))[0]) == 2.0


@distributed(world_size=2, isolated=True)
def test_a_group_is_gone_after_destroy_and_made_anew_when_asked_for(world: World) -> None:
    # A group of the same ranks as the world, but another one: as a user would make it.
    hp_platform.mark_created_groups(world.platform.new_group((0, 1), timedelta(seconds=30)))
    group = hp_platform.group_of([0, 1])
    hp_platform.destroy_process_group(group)
    again = hp_platform.group_of([0, 1])
    assert again is not group
    assert _sum_of_ranks(world, again) == 1.0


@distributed(world_size=2, isolated=True, backends=("torch", "cuda", "npu"))
def test_a_world_can_be_ended_and_made_again(world: World) -> None:
    for _ in range(2):
        x = world.platform.full((2,), 1.0, device=world.device)
        np.testing.assert_array_equal(world.platform.to_numpy(collectives.all_reduce(x)), [2.0, 2.0])
        hp_platform.destroy_process_group()
        assert not hp_platform.is_initialized()
        hp_platform.init_process_group(timeout=timedelta(seconds=30))


@distributed(world_size=1, init=False)
def test_a_process_that_nobody_launched_is_a_world_of_one(world: World) -> None:
    hp_platform.init_process_group()
    assert hp_platform.get_world().ranks == (0,)
    assert hp_platform.get_world().native is None
    x = world.platform.full((2,), 3.0, device=world.device)
    assert world.platform.data_ptr(collectives.all_reduce(x)) == world.platform.data_ptr(x)
    hp_platform.destroy_process_group()
    with pytest.raises(RuntimeError, match="there is no default process group"):
        collectives.barrier()
