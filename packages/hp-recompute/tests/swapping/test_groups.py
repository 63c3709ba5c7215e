"""What goes, what stays, what comes back when: groups of one step, and those that are moved by hand."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_platform.platform import require
from hp_platform.testing import World, distributed
from hp_recompute import CheckpointPolicy, swap
from hp_recompute.swapping.late_copies import late_copies
from hp_recompute.swapping.pinned import HostPool
from hp_recompute.swapping.storage import State, SwappedStorage

sys.path.insert(0, str(Path(__file__).parent))

from swap_models import WIDTH, assert_equal, make_blocks, plain, real, step


def an_input(world: World, *shape: int) -> Any:
    values = np.random.default_rng(3).uniform(-1, 1, shape or (4, WIDTH))
    return world.platform.set_requires_grad_(world.platform.tensor(values, real(world), world.device), True)


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
def test_memory_of_the_host_is_used_again_and_given_back(world: World) -> None:
    blocks = make_blocks(world)
    for group_swap in (False, True):
        with late_copies() as manager:
            taken = []
            for _ in range(3):
                step(world, lambda block, x: swap(block, x, group_swap=group_swap), blocks, (1, 0))  # noqa: B023
                gc.collect()
                taken.append(manager.host_nbytes)
            assert taken[0] == taken[1] == taken[2] > 0
            manager.free_host_memory()
            assert manager.host_nbytes == 0


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
def test_a_graph_goes_backward_again_and_gradients_have_gradients(world: World) -> None:
    platform, blocks = world.platform, make_blocks(world)
    second = platform.supports("double_backward", world.device)
    if not second:
        with pytest.raises(NotImplementedError):
            require(platform, "double_backward", world.device, what="the test")

    def run(call: Any) -> list[Any]:
        x = an_input(world)
        y = x
        for block in blocks:
            y = call(block, y)
        loss = platform.sum(y * y)
        for _ in range(2):
            platform.backward([loss], retain_graph=True)
        if second:
            (first,) = platform.grad([loss], [x], create_graph=True)
            platform.backward([platform.sum(first * first)])
        found = [platform.to_numpy(platform.get_grad(x))]
        for block in blocks:
            for parameter in (block.up, block.down):
                found.append(platform.to_numpy(platform.get_grad(parameter)))
                platform.set_grad(parameter, None)
        return found

    quiet = lambda block, x: step_without_dropout(platform, block, x)
    expected = run(quiet)
    with late_copies() as manager:
        assert_equal(run(lambda block, x: swap(quiet, block, x)), expected)
        gc.collect()
        assert not any(group.is_alive for group in list(manager._live.values()))


def step_without_dropout(platform: Any, block: Any, x: Any) -> Any:
    return x + platform.linear(platform.gelu(platform.linear(platform.sin(x), block.up)), block.down)


@distributed(world_size=1)
def test_what_came_back_leaves_the_device_when_a_graph_is_kept(world: World) -> None:
    platform, blocks = world.platform, make_blocks(world)
    with late_copies() as manager:
        x = an_input(world)
        for number, block in enumerate(blocks):
            manager.set_current_group_name(f"layer {number}")
            x = swap(block, x)
        before = manager.group_nbytes("layer 0")
        loss = platform.sum(x)
        platform.backward([loss], retain_graph=True)
        assert manager.group_nbytes("layer 0") == before


@distributed(world_size=1)
def test_a_write_to_a_saved_tensor_is_told_as_autograd_tells_it(world: World) -> None:
    platform = world.platform
    if not platform.supports("version_counter", world.device):
        assert platform.version(an_input(world)) == 0
        return

    def function(x: Any) -> Any:
        middle = platform.exp(x * 2)
        kept.append(middle)
        return platform.sin(middle)

    def write() -> None:
        with platform.no_grad():
            platform.add_(kept[0], 1.0)

    def writing(x: Any) -> Any:
        write()
        return platform.sin(x)

    for following in (platform.sin, writing):  # written before it starts for the host, and while it is copied
        kept: list[Any] = []
        with late_copies():
            y = swap(function, an_input(world))
            if following is platform.sin:
                write()
            other = swap(following, y)
            with pytest.raises(
                RuntimeError, match=r"saved tensor \d of .*function, .* modified by an inplace operation"
            ):
                platform.backward([platform.sum(other)])
    kept = []
    with late_copies():
        y = swap(function, an_input(world))
        alone = swap(platform.sin, an_input(world))
        write()
        platform.backward([platform.sum(alone)])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            platform.backward([platform.sum(y)])


@distributed(world_size=1)
def test_parameters_their_views_and_outputs_stay(world: World) -> None:
    platform = world.platform
    weight = platform.parameter(platform.tensor(np.ones((WIDTH, WIDTH)), real(world), world.device))
    asked: list[tuple[int, ...]] = []

    def policy(x: Any) -> Any:
        asked.append(tuple(x.shape))
        return CheckpointPolicy.MUST_SWAP

    def function(x: Any) -> Any:
        return platform.exp(platform.linear(platform.narrow(x, 0, 0, 3), weight))

    with late_copies() as manager:
        x = an_input(world, 5, WIDTH)
        manager.set_current_group_name("first")
        y = swap(function, x * 1, policy_fn=policy)
        manager.set_current_group_name("second")
        z = swap(function, y, policy_fn=policy)
        size = 3 * WIDTH * platform.itemsize(y.dtype)
        on_device, on_host = manager.group_nbytes("first")
        assert (on_device, on_host >= size) == (0, True), "its input goes, its output waits with the second"
        assert manager.group_nbytes("second")[0] >= 2 * size, "that, and an output of its own"
        assert (WIDTH, WIDTH) not in asked
        assert asked, "activations are asked for"
        platform.backward([platform.sum(z)])
        del y, z
        empty = platform.set_requires_grad_(platform.empty((0, WIDTH), real(world), world.device), True)
        asked.clear()
        swap(lambda x: platform.linear(x * 1, weight), empty, policy_fn=policy)
        assert asked == []
        assert manager.current is None


@distributed(world_size=1)
def test_a_function_that_fails_leaves_nothing_behind(world: World) -> None:
    platform, blocks = world.platform, make_blocks(world)
    expected = step(world, plain, blocks)
    middles: list[Any] = []

    def fails(x: Any) -> Any:
        middle = platform.exp(x * 2)
        middles.append(weakref.ref(middle))
        platform.sin(middle)
        raise KeyError("on purpose")

    with late_copies() as manager:
        for _ in range(2):
            try:
                swap(fails, an_input(world))
            except KeyError as error:
                error.with_traceback(None)
        gc.collect()
        assert manager.current is None
        assert [middle() for middle in middles] == [None, None]
        assert_equal(step(world, swap, blocks), expected)
        with platform.no_grad():
            swap(blocks[0], an_input(world))
        assert manager.current is None


@distributed(world_size=1)
def test_a_storage_goes_round_in_one_way_and_tells_of_others(world: World) -> None:
    way = [
        State.TO_HOST,
        State.HOST,
        State.TO_DEVICE,
        State.DEVICE,
        State.HOST,
        State.TO_DEVICE,
        State.DEVICE,
    ]
    storage = SwappedStorage(world.platform, None, world.device, 0)
    assert storage.state is State.DEVICE
    for state in way:
        storage.move(state)
        assert storage.state is state
    allowed = {
        (State.DEVICE, State.TO_HOST),
        (State.DEVICE, State.HOST),
        (State.TO_HOST, State.HOST),
        (State.TO_HOST, State.DEVICE),
        (State.HOST, State.TO_DEVICE),
        (State.TO_DEVICE, State.DEVICE),
    }
    for start in State:
        for state in State:
            storage = SwappedStorage(world.platform, None, world.device, 0)
            storage.state = start
            if (start, state) in allowed:
                storage.move(state)
            else:
                message = f"goes from {start.value} to {state.value}, which is no way of its own"
                with pytest.warns(UserWarning, match=message):
                    storage.move(state)


@distributed(world_size=1)
def test_memory_that_a_copy_goes_to_is_held_when_nobody_wants_it_any_more(world: World) -> None:
    platform = world.platform
    with late_copies() as manager:
        for name in ("dropped", "wanted"):
            manager.ensure_group(name)
        saved = {
            name: manager.add_storage(name, platform.full((5,), value, real(world), world.device))
            for name, value in (("dropped", 1.0), ("wanted", 2.0))
        }
        for name in saved:
            manager.launch_offload(name)
            manager.wait_offload(name)
        manager.launch_load("dropped")
        del saved["dropped"]
        manager.drop_group("dropped")
        gc.collect()
        before = manager.copies_of(world.device).num_copies
        np.testing.assert_array_equal(platform.to_numpy(saved["wanted"].get()), np.full(5, 2.0))
        assert manager.copies_of(world.device).num_copies == before + 2


@distributed(world_size=1)
def test_the_pool_gives_the_smallest_piece_that_fits(world: World) -> None:
    made: list[int] = []

    def empty(nbytes: int) -> Any:
        made.append(nbytes)
        return bytearray(nbytes)

    pool = HostPool(empty, exact=False)
    buffers = [pool.take(nbytes) for nbytes in (100, 300, 120)]
    assert pool.nbytes == 520
    assert pool.free_nbytes == 0
    buffers.clear()
    assert pool.free_nbytes == 520
    assert len(pool.take(101).memory) == 120
    kept = pool.take(101)
    assert len(kept.memory) == 120, "the one before came back"
    assert len(pool.take(40).memory) == 40, "100 is more than twice as large"
    assert made == [100, 300, 120, 40]
    pool.clear()
    assert pool.nbytes == 120
    exact = HostPool(empty, exact=True)
    exact.take(100)
    assert len(exact.take(99).memory) == 99


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
