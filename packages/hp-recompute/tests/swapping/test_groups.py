"""What goes, what stays, what comes back when: groups of one step, and those that are moved by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_platform.testing import World, distributed
from hp_recompute import swap
from hp_recompute.swapping.late_copies import late_copies
from hp_recompute.swapping.storage import State

sys.path.insert(0, str(Path(__file__).parent))

from swap_models import WIDTH, an_input, assert_equal, make_blocks, real, step


@distributed(world_size=1)
def test_after_forward_only_the_last_group_is_on_the_device(world: World) -> None:
    platform, blocks = world.platform, make_blocks(world, 4)
    with late_copies() as manager:
        x = an_input(world)
        for number, block in enumerate(blocks):
            manager.set_current_group_name(f"layer {number}")
            x = swap(block, x)
        found = [manager.group_nbytes(f"layer {number}") for number in range(4)]
        # The input of layer 0 is held by this test, outputs by the layers behind: they are not the layers' to free.
        assert [on_host > 0 for _, on_host in found] == [True, True, True, False], found
        assert [manager.is_last_group(f"layer {number}") for number in range(4)] == [
            False,
            False,
            False,
            True,
        ]
        on_device, on_host = zip(*found, strict=True)
        assert max(on_device[:3]) < min(on_host[:3]), found
        if platform.num_over_storage(x) is not None:
            assert on_device[1:3] == (0, 0), found
        assert manager.host_nbytes >= sum(on_host)
        platform.backward([platform.sum(x)])
        with pytest.raises(RuntimeError, match="there is no group 'layer 0' that backward still needs"):
            manager.group_nbytes("layer 0")


@distributed(world_size=1)
def test_groups_are_fetched_in_the_order_that_backward_has_shown(world: World) -> None:
    blocks = make_blocks(world)
    for order in ((0,), (1, 0), (0, 1), (2, 0, 1), (1, 2, 0)):
        with late_copies() as manager:
            late = []
            for _ in range(3):
                before = manager.num_not_fetched
                step(world, swap, blocks, order)
                late.append(manager.num_not_fetched - before)
            # A backward that begins where nothing was wanted before finds its first group on the host, unless that never left.
            first_is_there = order[0] == max(order)
            assert late[1:] == [0 if first_is_there else 1] * 2, (order, late)


@distributed(world_size=1)
def test_views_of_one_memory_are_copied_once_and_come_back_as_views_of_one(world: World) -> None:
    platform = world.platform
    base = platform.tensor(np.arange(24.0).reshape(4, 6), real(world), world.device)
    views = [
        platform.narrow(base, 1, 0, 2),
        platform.transpose(platform.narrow(base, 1, 3, 3), 0, 1),
        platform.narrow(base, 0, 1, 1),
    ]
    expected = [platform.to_numpy(view) for view in views]
    strides = [platform.storage_place(view).strides for view in views]
    with late_copies() as manager:
        manager.ensure_group("views")
        saved = [manager.add_storage("views", view) for view in views]
        with pytest.warns(UserWarning, match="has this tensor of shape"):
            assert manager.add_storage("views", views[0]) is saved[0]
        del base, views
        manager.launch_offload("views")
        manager.wait_offload("views")
        assert manager.copies_of(world.device).num_copies == 1
        manager.launch_load("views")
        manager.wait_load("views")
        assert manager.copies_of(world.device).num_copies == 2
        found = [each.get() for each in saved]
        assert_equal([platform.to_numpy(each) for each in found], expected)
        assert [platform.storage_place(each).strides for each in found] == strides
        assert len({platform.storage_place(each).key for each in found}) == 1
        manager.release_group_storage("views")
        assert saved[0].storage.state is State.HOST
        assert_equal([platform.to_numpy(each.get()) for each in saved], expected)
        manager.drop_group("views")
        assert_equal([platform.to_numpy(each.get()) for each in saved], expected)


@distributed(world_size=1)
def test_small_tensors_travel_together(world: World) -> None:
    blocks, counts = make_blocks(world), []
    for group_swap in (False, True):
        with late_copies() as manager:
            step(world, lambda block, x: swap(block, x, group_swap=group_swap), blocks)  # noqa: B023
            counts.append(manager.copies_of(world.device).num_copies)
    assert counts[1] == 2 * 2, "two blocks of three leave, in one bucket each"
    assert counts[0] > 4 * counts[1]


@distributed(world_size=1)
def test_two_groups_are_on_the_device_at_most(world: World) -> None:
    platform, blocks = world.platform, make_blocks(world, 6)
    seen: dict[str, list[int]] = {}
    with late_copies() as manager:

        def look(where: str) -> None:
            seen.setdefault(where, []).append(manager.device_nbytes)

        def layer(block: Any, x: Any) -> Any:
            middle = x * 1
            platform.register_tensor_hook(middle, lambda grad: look("end of a backward"))
            y = block(middle)
            look("end of a forward")
            return y

        for group_swap in (False, True):
            for number in range(3):
                seen.clear()
                x = an_input(world, 64, WIDTH)
                for block in blocks:
                    x = swap(layer, block, x, group_swap=group_swap)
                    look("between")
                platform.backward([platform.sum(x)])
                assert len(seen["end of a backward"]) == len(blocks)
                one = seen["between"][0]
                if not group_swap and number == 0:
                    assert seen["between"] == [one] * 6, "the last one alone"
                assert max(seen["between"]) <= 2 * one, (
                    "in later steps the other one, while nobody needs its room"
                )
                assert seen["between"][-1] == one
                assert seen["end of a forward"] == [one] + [2 * one] * 5, "and the one before, on its way"
                # What a group had is freed by then, and the one before has been fetched.
                assert seen["end of a backward"] == [one] * 5 + [0]
                assert manager.device_nbytes == 0
