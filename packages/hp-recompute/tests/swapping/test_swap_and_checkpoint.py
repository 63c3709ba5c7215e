"""What a checkpoint keeps between its two runs waits on the host: arguments, and results that its policy lets be swapped."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_platform.platform import require
from hp_platform.testing import World, distributed
from hp_recompute import CheckpointPolicy, checkpoint, checkpoint_wrapper, swap
from hp_recompute.swapping.late_copies import late_copies

sys.path.insert(0, str(Path(__file__).parent))

from swap_models import assert_equal, make_blocks, plain, real, step

ORDERS = ((0,), (1, 0), (0, 1), (2, 0, 1))


@distributed(world_size=1)
def test_arguments_of_a_checkpoint_are_swapped(world: World) -> None:
    platform, blocks = world.platform, make_blocks(world)

    def call(block: Any, x: Any, **options: Any) -> Any:
        # The input is dropped by the caller, so that its memory is the checkpoint's alone.
        return checkpoint(block, x * 2, swap_inputs=True, **options)

    for order in ORDERS:
        expected = step(world, lambda block, x: block(x * 2), blocks, order)
        for group_swap in (False, True):
            with late_copies() as manager:
                for _ in range(2):
                    assert_equal(step(world, partial(call, group_swap=group_swap), blocks, order), expected)
                assert manager.copies_of(world.device).num_copies > 0
    with late_copies() as manager:
        x = platform.set_requires_grad_(platform.full((4, 6), 0.5, real(world), world.device), True)
        size = 4 * 6 * platform.itemsize(x.dtype)
        for number, block in enumerate(blocks):
            manager.set_current_group_name(f"layer {number}")
            x = call(block, x)
        found = [manager.group_nbytes(f"layer {number}") for number in range(3)]
        assert found == [(0, size), (0, size), (size, 0)], found


@distributed(world_size=1)
def test_results_that_a_policy_swaps_are_not_computed_again(world: World) -> None:
    platform, blocks = world.platform, make_blocks(world)
    if not platform.supports("operation_dispatch", world.device):
        with pytest.raises(NotImplementedError, match="operation_dispatch"):
            require(platform, "operation_dispatch", world.device, what="the test")
        return
    answers = {name: getattr(CheckpointPolicy, name) for name in ("MUST_SWAP", "MUST_SAVE", "MUST_RECOMPUTE")}

    counts: dict[bool, int] = {}

    def policy(answer: Any, context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
        if "mm" not in str(operation):
            return CheckpointPolicy.PREFER_RECOMPUTE
        counts[context.is_recompute] = counts.get(context.is_recompute, 0) + 1
        return answer

    for order in ORDERS:
        expected = step(world, plain, blocks, order)
        for name, answer in answers.items():
            for options in ({}, {"swap_inputs": True}, {"group_swap": True, "early_stop": False}):
                counts.clear()
                with late_copies() as manager:
                    call = partial(checkpoint, policy_fn=partial(policy, answer), **options)
                    assert_equal(step(world, call, blocks, order), expected)
                    moved = manager.host_nbytes > 0
                assert moved == (name == "MUST_SWAP" or "swap_inputs" in options), (name, options)
                assert counts[False] > 0
                assert counts[True] > 0


@distributed(world_size=1)
def test_a_swapped_result_that_is_written_is_told(world: World) -> None:
    platform = world.platform
    if not platform.supports("operation_dispatch", world.device):
        with pytest.raises(NotImplementedError, match="operation_dispatch"):
            checkpoint(platform.sin, platform.zeros((2,)), policy_fn=lambda *args: True)
        return
    weight = platform.parameter(platform.tensor(np.eye(3), real(world), world.device))

    def function(x: Any) -> Any:
        middle = platform.matmul(x, weight)
        written = platform.sin(middle * 1)
        with platform.no_grad():
            platform.add_(middle, 1.0)
        return written

    with late_copies():
        x = platform.set_requires_grad_(platform.full((2, 3), 0.5, real(world), world.device), True)
        y = checkpoint(
            function, x * 1, policy_fn=lambda context, op, *args, **kwargs: CheckpointPolicy.MUST_SWAP
        )
        y = swap(platform.sin, y)
        with pytest.raises(
            RuntimeError, match=r"saved tensor \d of .*function, .* modified by an inplace operation"
        ):
            platform.backward([platform.sum(y)])


@distributed(world_size=1)
def test_checkpointed_modules_swap_and_nest(world: World) -> None:
    expected = step(world, lambda block, x: block(x * 1), make_blocks(world), (1, 2, 0))
    blocks = [checkpoint_wrapper(block, swap_inputs=True, group_swap=True) for block in make_blocks(world)]
    calls = {
        "alone": lambda block, x: block(x * 1),
        "in swap": lambda block, x: swap(lambda x: block(x * 1), x),
        "in checkpoint": lambda block, x: checkpoint(lambda x: block(x * 1), x, swap_inputs=True),
    }
    for call in calls.values():
        with late_copies() as manager:
            assert_equal(step(world, call, blocks, (1, 2, 0)), expected)
            assert manager.current is None
    for name in ("swap_inputs", "group_swap"):
        with pytest.raises(ValueError, match=f"{name} is True or False, got 'yes'"):
            checkpoint(print, **{name: "yes"})
