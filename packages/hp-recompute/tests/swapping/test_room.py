"""Copies take their time where there is room, and nothing else changes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_platform.testing import World, distributed
from hp_recompute import CheckpointPolicy, checkpoint, swap, swap_wrapper
from hp_recompute.swapping.copies import copies_on_streams
from hp_recompute.swapping.late_copies import LateCopies, late_copies
from hp_recompute.swapping.manager import SwapManager, use_manager
from hp_recompute.swapping.order import MOST
from hp_recompute.swapping.room import Room

sys.path.insert(0, str(Path(__file__).parent))

from swap_models import WIDTH, assert_equal, make_blocks, plain, real, step
from timeline import OPERATIONS, Timeline, layer_of

SIZE = 1000


def keep(x: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def ones(world: World) -> Any:
    """The input of a step."""
    platform = world.platform
    return platform.set_requires_grad_(platform.full((SIZE,), 1.0, real(world), world.device), True)


def check_gradient(world: World, x: Any, calls: list[Callable[[Any], Any]]) -> None:
    """Every operation of every layer doubles."""
    gradient = world.platform.to_numpy(world.platform.get_grad(x))
    np.testing.assert_array_equal(gradient, np.full(SIZE, 2.0 ** (OPERATIONS * len(calls))))


def two_moved_of_eight(world: World, timeline: Timeline) -> list[Callable[[Any], Any]]:
    """Layers, of which the first two are swapped and the others kept."""
    layer = layer_of(world.platform, timeline)
    return [swap_wrapper(layer)] * 2 + [swap_wrapper(layer, keep)] * 6


def steps_of(world: World, timeline: Timeline, calls: list[Callable[[Any], Any]], number: int) -> list[Any]:
    """Of steps: milliseconds, the part in which the device computed, and the peak in layers."""
    platform, found = world.platform, []
    nbytes = OPERATIONS * SIZE * platform.itemsize(platform.dtype(real(world)))
    assert nbytes == timeline.layer_nbytes
    with use_manager(timeline.manager):
        for _ in range(number):
            timeline.new_step()
            x = ones(world)
            y = x
            for call in calls:
                y = call(y)
            platform.backward([platform.sum(y)])
            del y
            check_gradient(world, x, calls)
            found.append((*timeline.milliseconds, timeline.peak_nbytes / nbytes))
    return found


def a_timeline(world: World, copy: float, gradients: float = 0.0) -> Timeline:
    layer_nbytes = OPERATIONS * SIZE * world.platform.itemsize(world.platform.dtype(real(world)))
    return Timeline(
        forward=7.0, copy=copy, layer_nbytes=layer_nbytes, gradient_nbytes=int(gradients * layer_nbytes)
    )


@distributed(world_size=1)
def test_copies_of_first_layers_hide_behind_all_that_follow_and_nothing_takes_more_memory(
    world: World,
) -> None:
    platform = world.platform

    class Layer(platform.Module):
        def __init__(self, timeline: Timeline) -> None:
            super().__init__()
            self.own = layer_of(platform, timeline)

        def forward(self, x: Any) -> Any:
            return self.own(x)

    for in_a_chain in (False, True):
        timeline = a_timeline(world, copy=24.0, gradients=0.3)
        if in_a_chain:
            layers = [Layer(timeline) for _ in range(8)]
            for layer in layers[:2]:
                swap_wrapper(layer)
            for first, second in pairwise(layers):
                timeline.manager.set_forward_prefetch_layer(first, second)
            calls = list(layers)
        else:
            layer = layer_of(platform, timeline)
            calls = [swap_wrapper(layer)] * 2 + [swap_wrapper(layer, keep)] * 6
        (first, *later) = steps_of(world, timeline, calls, 4)
        # Forward waits for each copy when the next layer ends; a chain fetches one layer before, as long as nothing else is known.
        assert first[0] - first[1] == pytest.approx(
            2 * (24.0 - 7.0) + in_a_chain * 2 * (24.0 - 14.0), abs=0.1
        )
        for milliseconds, computed, peak in later:
            assert milliseconds <= 1.01 * computed
            assert peak <= first[2] + 1e-9 <= 6.2, "two of eight layers were on the host when backward began"


@distributed(world_size=1)
def test_where_no_memory_is_free_copies_are_waited_for_as_early_as_ever(world: World) -> None:
    timeline = a_timeline(world, copy=24.0)
    calls = [swap_wrapper(layer_of(world.platform, timeline))] * 8
    (first, *later) = steps_of(world, timeline, calls, 3)
    # The link is busy all the time that forward and backward may use it.
    assert 7 * 2 * 24.0 < first[0] < 7 * 2 * 24.0 + 7.0 + 2 * 14.0
    for milliseconds, _, peak in later:
        assert milliseconds <= first[0] + 1e-9
        assert peak <= first[2] == pytest.approx(2.0, abs=0.1)


@distributed(world_size=1)
def test_numbers_stay_when_micro_batches_checkpoints_and_kept_layers_mix(world: World) -> None:
    expected = {
        order: step(world, plain, make_blocks(world, 4), order) for order in ((0,), (1, 0), (0, 2, 1))
    }
    ways = [swap, lambda *args: swap(*args, policy_fn=keep), checkpoint, plain]
    ways.append(lambda *args: checkpoint(*args, swap_inputs=True))
    ways.append(lambda block, x: swap(lambda x: checkpoint(block, x), x))
    for shift in (0, 3):
        with late_copies():
            blocks = make_blocks(world, 4)
            call = lambda block, x: ways[(blocks.index(block) + shift) % len(ways)](block, x)  # noqa: B023
            for order in ((0,), (1, 0), (1, 0), (0, 2, 1), (0, 2, 1), (0,)):
                assert_equal(step(world, call, blocks, order), expected[order])


@distributed(world_size=1)
def test_a_forward_that_fails_or_has_no_backward_leaves_nothing_on_the_device(world: World) -> None:
    timeline = a_timeline(world, copy=24.0)
    calls = two_moved_of_eight(world, timeline)
    expected = steps_of(world, timeline, calls, 3)

    def fails(x: Any) -> Any:
        raise KeyError("on purpose")

    for last in (fails, None):
        with use_manager(timeline.manager):
            x = ones(world)
            for call in calls[:3]:
                x = call(x)
            if last is fails:
                with pytest.raises(KeyError, match="on purpose"):
                    swap(fails, x)
            del x
            gc.collect()
            assert timeline.manager.device_nbytes == timeline.num_held == 0
        found = steps_of(world, timeline, calls, 3)
        assert found[-1] == pytest.approx(expected[-1])
        assert timeline.manager.device_nbytes == 0


def test_what_is_known_of_groups_does_not_grow_without_end() -> None:
    room = Room(lambda: 0)
    for number in range(MOST + 2):
        room.begun(0)
        room.ended(number, 0)
    assert len(room._between) == MOST


@distributed(world_size=1)
def test_a_backward_that_fails_may_be_done_again_and_the_next_step_is_as_ever(world: World) -> None:
    platform = world.platform
    timeline = a_timeline(world, copy=24.0)
    calls = two_moved_of_eight(world, timeline)
    expected = steps_of(world, timeline, calls, 3)

    def fails(gradient: Any) -> None:
        if fail:
            raise KeyError("on purpose")

    for place in (2, 1, 0):
        with use_manager(timeline.manager):
            x = ones(world)
            ys = [x]
            for call in calls:
                ys.append(call(ys[-1]))
            fail = True
            platform.register_tensor_hook(ys[place], fails)
            loss = platform.sum(ys[-1])
            with pytest.raises(KeyError, match="on purpose"):
                platform.backward([loss], retain_graph=True)
            fail = False
            platform.backward([loss])
            check_gradient(world, x, calls)
            del x, ys, loss
        assert steps_of(world, timeline, calls, 3)[-1] == pytest.approx(expected[-1])


@distributed(world_size=1)
def test_what_was_fetched_for_a_backward_that_does_not_come_is_given_back(world: World) -> None:
    platform = world.platform
    timeline = a_timeline(world, copy=1.0)
    calls = two_moved_of_eight(world, timeline)
    steps_of(world, timeline, calls, 2)
    with use_manager(timeline.manager):
        x = ones(world)
        ys = [x]
        for number, call in enumerate(calls):
            timeline.manager.set_current_group_name(f"layer {number}")
            ys.append(call(ys[-1]))
        timeline.manager.set_current_group_name(None)
        (gradient,) = platform.grad(
            [platform.sum(ys[-1])], [ys[4]], retain_graph=True
        )  # of the layers behind the fourth
        np.testing.assert_array_equal(platform.to_numpy(gradient), np.full(SIZE, 2.0 ** (4 * OPERATIONS)))
        names = ["layer 0", "layer 1"]
        on_device = [timeline.manager.group_nbytes(name)[0] for name in names]
        other = swap(layer_of(platform, timeline), ones(world))
        given_back = [timeline.manager.group_nbytes(name)[0] for name in names]
        assert sum(on_device) >= sum(given_back)
        assert max(given_back) <= SIZE * platform.itemsize(x.dtype)
        platform.backward([platform.sum(ys[-1])])
        np.testing.assert_array_equal(
            platform.to_numpy(platform.get_grad(x)), np.full(SIZE, 2.0 ** (8 * OPERATIONS))
        )
        platform.backward([platform.sum(other)])


@distributed(world_size=1)
def test_outputs_that_two_groups_save_move_with_the_second_for_both(world: World) -> None:
    platform = world.platform

    def layer(x: Any) -> Any:
        return platform.exp(platform.sin(x) * 0.1)

    def gradients(manager: SwapManager, call: Callable[[Any], Any], retain: bool) -> list[Any]:
        x = platform.set_requires_grad_(
            platform.tensor(np.random.default_rng(3).uniform(-1, 1, (4, WIDTH)), real(world), world.device),
            True,
        )
        y = x
        for _ in range(4):
            y = call(y)
        loss = platform.sum(y * y)
        del y
        on_device = manager.device_nbytes
        for _ in range(2 if retain else 1):
            platform.backward([loss], retain_graph=retain)
        return [on_device, platform.to_numpy(platform.get_grad(x))]

    for retain in (False, True):
        _, expected = gradients(SwapManager(), layer, retain)
        for calls in (
            lambda y: swap(layer, y),
            lambda y: swap(layer, y, group_swap=True),
            lambda y: swap(lambda y: swap(layer, y), y),
        ):
            with late_copies() as manager:
                for _ in range(3):
                    on_device, found = gradients(manager, calls, retain)
                    assert_equal([found], [expected])
                    size = 4 * WIDTH * platform.itemsize(platform.dtype(real(world)))
                    # The last one's argument, what is in it and its result, and the first one's, which is held here.
                    assert on_device <= 5 * size, "no output of another one"
                    gc.collect()
                    assert manager.device_nbytes == 0
    with late_copies() as manager:
        y = platform.set_requires_grad_(platform.full((3,), 0.5, real(world), world.device), True)
        for number, policy in enumerate((keep, None, None)):
            manager.set_current_group_name(f"layer {number}")
            y = swap(layer, y, policy_fn=policy)
        nbytes = [manager.group_nbytes(f"layer {number}") for number in range(3)]
        size = 3 * platform.itemsize(y.dtype)
        assert nbytes[0][1] == 0, "what was chosen to stay stays, whoever saves it"
        assert nbytes[0][0] >= size
        platform.backward([platform.sum(y)])


@distributed(world_size=1)
def test_groups_move_on_streams_of_the_callers(world: World) -> None:
    platform, device = world.platform, world.platform.device(world.device)
    on_streams = platform.supports("streams", world.device)
    own = SwapManager(copies=copies_on_streams) if on_streams else SwapManager(copies=LateCopies)
    with use_manager(own) as manager:
        stream = device.new_stream()
        for name, moved in (("first", stream), ("second", None), ("third", stream)):
            manager.ensure_group(name)
            saved = manager.add_storage(name, platform.full((SIZE,), 2.0, real(world), world.device))
            manager.launch_offload(name, copy_stream=moved)
            manager.wait_offload(name)
            assert manager.group_nbytes(name) == (0, saved.storage.nbytes)
            manager.launch_load(name, copy_stream=moved)
            manager.wait_load(name)
            np.testing.assert_array_equal(platform.to_numpy(saved.get()), np.full(SIZE, 2.0))
