"""What backward sees of swapped tensors: graphs that are kept, writes, parameters, failures."""

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

sys.path.insert(0, str(Path(__file__).parent))

from swap_models import WIDTH, an_input, assert_equal, make_blocks, plain, real, step


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
