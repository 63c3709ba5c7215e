"""Modules that swap themselves stay what they are; layers of a chain; single tensors."""

from __future__ import annotations

import copy
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_platform.testing import World, distributed
from hp_recompute import (
    CheckpointPolicy,
    SwapManager,
    checkpoint,
    swap,
    swap_tensor_wrapper,
    swap_wrapper,
)
from hp_recompute.swapping.late_copies import LateCopies, late_copies

sys.path.insert(0, str(Path(__file__).parent))

from swap_models import WIDTH, assert_equal, make_blocks, plain, real, step


@distributed(world_size=1)
def test_a_wrapped_module_is_the_same_object_and_gives_the_same_numbers(world: World) -> None:
    platform = world.platform
    expected = step(world, plain, make_blocks(world), (1, 0))
    with late_copies() as manager:
        for group_swap in (False, True):
            blocks = make_blocks(world)
            for block in blocks:
                names, kind = list(platform.state_dict(block)), type(block).__name__
                assert swap_wrapper(block, group_swap=group_swap, offload_to="cpu") is block
                assert (list(platform.state_dict(block)), type(block).__name__) == (names, kind)
            assert_equal(step(world, plain, blocks, (1, 0)), expected)
            assert_equal(step(world, plain, copy.deepcopy(blocks), (1, 0)), expected)
        assert manager.copies_of(world.device).num_copies > 0


@distributed(world_size=1)
def test_functions_are_wrapped_too(world: World) -> None:
    platform = world.platform

    def function(x: Any, *, power: int) -> Any:
        """Its own words."""
        return platform.sin(platform.exp(x)) * power

    wrapped = swap_wrapper(function)
    assert (wrapped.__name__, wrapped.__doc__) == ("function", "Its own words.")
    with late_copies() as manager:
        x = platform.set_requires_grad_(platform.full((2,), 0.5, "float32", world.device), True)
        y = wrapped(wrapped(x, power=2), power=3)
        assert manager.group_nbytes(manager._ended[-1].name)[0] > 0
        platform.backward([platform.sum(y)])
    inner = 2 * np.sin(np.exp(0.5))
    slope = 3 * np.cos(np.exp(inner)) * np.exp(inner) * 2 * np.cos(np.exp(0.5)) * np.exp(0.5)
    np.testing.assert_allclose(platform.to_numpy(platform.get_grad(x)), slope, rtol=1e-5)


@distributed(world_size=1)
def test_wrapped_modules_in_each_other_are_told(world: World) -> None:
    platform = world.platform

    class Model(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = platform.ModuleList(make_blocks(world))

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return x

    model = Model()
    swap_wrapper(model.blocks[0])
    with pytest.warns(UserWarning, match=r"Model swaps now, and so does blocks.0 in it"):
        swap_wrapper(model)
    with pytest.warns(UserWarning, match="belongs|goes with the inner one; wrap one of them"):
        swap_wrapper(model.blocks[0])
    with late_copies():
        found = step(world, lambda _, x: model(x), [model])
    assert_equal(found, step(world, plain, make_blocks(world)))


@distributed(world_size=1)
def test_the_last_layer_of_a_chain_stays_whatever_runs_behind_it(world: World) -> None:
    platform = world.platform
    expected = step(world, plain, make_blocks(world, 4), (1, 2, 0))
    with late_copies() as manager:
        blocks = make_blocks(world, 4)
        for block in blocks:
            swap_wrapper(block)
        for first, second in ((blocks[1], blocks[2]), (blocks[0], blocks[1]), (blocks[1], blocks[2])):
            manager.set_forward_prefetch_layer(first, second)
        assert manager.chain_of(blocks[1]) == ["swap_group_2", "swap_group_0", "swap_group_1"]
        assert manager.chain_of(blocks[3]) == []
        x = platform.set_requires_grad_(platform.full((4, WIDTH), 0.5, real(world), world.device), True)
        y = x
        for block in blocks:
            y = block(y)
        names = ["swap_group_2", "swap_group_0", "swap_group_1"]
        assert [manager.is_last_group(name) for name in names] == [False, False, True]
        assert [manager.group_nbytes(name)[1] > 0 for name in names] == [True, True, False]
        del y
        for _ in range(2):
            assert_equal(step(world, plain, blocks, (1, 2, 0)), expected)


@distributed(world_size=1)
def test_the_manager_that_anybody_makes_is_the_one_that_moves(world: World) -> None:
    platform = world.platform
    assert SwapManager() is SwapManager()
    with late_copies() as manager:
        assert SwapManager() is manager
        blocks = make_blocks(world)
        for first, second in pairwise(blocks):
            SwapManager().set_forward_prefetch_layer(first, second)
        others = make_blocks(world, 2)
        SwapManager().set_forward_prefetch_layer(*others)
        names = SwapManager().chain_of(blocks[0]) + SwapManager().chain_of(others[0])
        assert len(set(names)) == 5, names
        x = platform.set_requires_grad_(platform.full((4, WIDTH), 0.5, real(world), world.device), True)
        SwapManager().set_current_group_name("mine")
        y = swap(platform.sin, swap(platform.sin, x * 1))
        assert SwapManager().group_nbytes("mine")[0] > 0
        own = SwapManager(copies=LateCopies)
        with pytest.raises(RuntimeError, match="there is no group 'mine'"):
            own.group_nbytes("mine")
        platform.backward([platform.sum(y)])
    assert SwapManager() is not manager


@distributed(world_size=1)
def test_single_tensors_of_layers_in_a_chain_are_swapped(world: World) -> None:
    platform = world.platform
    width = 2 * WIDTH

    class Layer(platform.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            values = np.random.default_rng(seed).uniform(-1, 1, (width, WIDTH))
            self.up = platform.parameter(platform.tensor(values, real(world), world.device))
            self.down = platform.parameter(platform.tensor(values.T.copy(), real(world), world.device))
            self.chooses = True

        def forward(self, x: Any) -> Any:
            middle = platform.linear(x, self.up)
            if self.chooses:
                assert swap_tensor_wrapper(middle, "middle", group_swap=True) is middle
            return x + platform.linear(platform.sin(middle), self.down)

    def run(chooses: bool) -> list[Any]:
        layers = [Layer(seed) for seed in range(3)]
        with late_copies() as manager:
            for layer in layers:
                layer.chooses = chooses
            for first, second in pairwise(layers):
                manager.set_forward_prefetch_layer(first, second)
            x = platform.set_requires_grad_(platform.full((3, WIDTH), 0.5, real(world), world.device), True)
            y = x
            for layer in layers:
                y = layer(y)
            size = 3 * width * platform.itemsize(y.dtype)
            on_host = [manager.group_nbytes(name)[1] for name in manager.chain_of(layers[0])]
            assert on_host == ([size, size, 0] if chooses else [0, 0, 0]), on_host
            platform.backward([platform.sum(y * y)])
        leaves = [x, *(p for layer in layers for _, p in platform.named_parameters(layer))]
        return [platform.to_numpy(platform.get_grad(leaf)) for leaf in leaves]

    assert_equal(run(True), run(False))


@distributed(world_size=1)
def test_wrong_calls_say_what_to_do(world: World) -> None:
    platform = world.platform
    x = platform.full((2,), 1.0, real(world), world.device)
    first, second, third = make_blocks(world)
    manager = SwapManager()
    manager.set_forward_prefetch_layer(first, second)
    value_errors: list[tuple[Any, str]] = [
        (lambda: swap(x), r"swap\(block, x\), not swap\(block\(x\)\)"),
        (lambda: swap(3), "takes a callable and its arguments, got int"),
        (lambda: swap(print, policy_fn=3), "a function of a tensor that answers .*, got 3"),
        (lambda: swap(print, group_swap="yes"), "group_swap is True or False, got 'yes'"),
        (lambda: swap_wrapper("block"), "takes a module or another callable, got str"),
        (lambda: swap_wrapper(type(first)), "takes a module, got the class Block: make one of it"),
        (
            lambda: swap_wrapper(platform.ModuleList([first])),
            "swap_wrapper: a ModuleList has no forward, .*: call swap_wrapper on each of its modules",
        ),
        (lambda: swap_wrapper(print, offload_to="disk"), "offload_to='disk': .* the memory of the host"),
        (lambda: swap_wrapper(print, [3]), r"a function of a tensor that answers .*, got \[3\]"),
        (lambda: swap_wrapper(print, group_swap=1), "group_swap is True or False, got 1"),
        (lambda: swap_tensor_wrapper(3), "takes a tensor, got int"),
        (lambda: swap_tensor_wrapper(x, 3), "tag=3: a name for messages, or None"),
        (lambda: swap_tensor_wrapper(x, group_swap=None), "group_swap is True or False, got None"),
        (lambda: manager.ensure_group(""), "a text that is not empty, got ''"),
        (lambda: manager.set_current_group_name(3), "a text that is not empty, or None, got 3"),
        (lambda: manager.set_forward_prefetch_layer(first, print), "takes two modules, got builtin"),
        (
            lambda: manager.set_forward_prefetch_layer(first, third),
            "swap_group_0 is followed by swap_group_1 already",
        ),
        (
            lambda: manager.set_forward_prefetch_layer(third, second),
            "swap_group_1 follows swap_group_0 already",
        ),
        (
            lambda: manager.set_forward_prefetch_layer(second, first),
            "swap_group_1 comes after swap_group_0 already: a chain has an end",
        ),
    ]
    for call, message in value_errors:
        with pytest.raises(ValueError, match=message):
            call()
    with late_copies() as late:
        late.ensure_group("made")
        runtime_errors: list[tuple[Any, str]] = [
            (
                lambda: late.launch_offload("other"),
                "there is no group 'other' .* there are 'made': ensure_group",
            ),
            (lambda: late.add_storage("other", x), "there is no group 'other'"),
            (lambda: late.is_last_group("other"), "there is no group 'other'"),
            (lambda: late.protect_alias_tensors("other", x), "there is no group 'other'"),
            (lambda: late.release_group_storage("other"), "there is no group 'other'"),
            (lambda: late.drop_group("other"), "there is no group 'other'"),
            (lambda: late.wait_offload("made"), "is not on its way to the host: call launch_offload before"),
            (lambda: late.wait_load("made"), "is not on its way to the device: call launch_load before"),
        ]
        for call, message in runtime_errors:
            with pytest.raises(RuntimeError, match=message):
                call()
        with pytest.raises(ValueError, match="add_storage takes a tensor, got int"):
            late.add_storage("made", 3)
        with pytest.raises(ValueError, match="cannot be swapped: give one that is no parameter"):
            late.add_storage("made", first.up)
        y = platform.set_requires_grad_(x * 1, True)
        for answer in (CheckpointPolicy.MUST_RECOMPUTE, True, None):
            with pytest.raises(RuntimeError, match=r"answered .*: give CheckpointPolicy.MUST_SWAP"):
                swap(lambda y: platform.sin(y * 2), y, policy_fn=lambda y, answer=answer: answer)
        with pytest.warns(UserWarning, match="where no layer is under way that swaps"):
            swap_tensor_wrapper(y)
        with pytest.warns(UserWarning, match="was given the same Block twice"):
            late.set_forward_prefetch_layer(third, third)
        assert checkpoint(lambda y: swap_tensor_wrapper(y) * 2, y).shape == y.shape
