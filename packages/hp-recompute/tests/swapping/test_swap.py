"""A swapped call is the plain call, whatever goes to the host and back in between."""

from __future__ import annotations

import gc
import itertools
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hp_platform.testing import World, distributed
from hp_recompute import CheckpointPolicy, checkpoint, swap
from hp_recompute.swapping.late_copies import late_copies

sys.path.insert(0, str(Path(__file__).parent))

from swap_models import assert_equal, make_blocks, plain, step

ORDERS = list(itertools.permutations(range(3)))
POLICIES = {
    "all": None,
    "none": lambda x: CheckpointPolicy.MUST_SAVE,
    "small": lambda x: (
        CheckpointPolicy.MUST_SWAP if tuple(x.shape)[-1:] == (6,) else CheckpointPolicy.MUST_SAVE
    ),
}


@pytest.mark.parametrize("group_swap", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@distributed(world_size=1)
def test_outputs_and_gradients_are_those_of_the_plain_call(
    world: World, policy: str, group_swap: bool
) -> None:
    def call(block: Any, x: Any) -> Any:
        return swap(block, x, policy_fn=POLICIES[policy], group_swap=group_swap)

    blocks = make_blocks(world)
    for order in ((0,), *ORDERS):
        expected = step(world, plain, blocks, order)
        with late_copies() as manager:
            for _ in range(2):
                assert_equal(step(world, call, blocks, order), expected)
            gc.collect()
            assert not any(group.is_alive for group in list(manager._live.values()))
            assert (manager.host_nbytes > 0) == (policy != "none")


@distributed(world_size=1)
def test_swap_on_its_own_device_gives_the_plain_numbers(world: World) -> None:
    blocks = make_blocks(world)
    for group_swap in (False, True):
        call = partial(swap, group_swap=group_swap)
        assert_equal(step(world, call, blocks, (1, 0, 2)), step(world, plain, blocks, (1, 0, 2)))


@distributed(world_size=1)
def test_swap_and_checkpoint_nest(world: World) -> None:
    def around(block: Any, x: Any) -> Any:
        return swap(lambda x: checkpoint(block, x) * 2, x)

    def inside(block: Any, x: Any) -> Any:
        return checkpoint(lambda x: swap(block, x) * 2, x)

    def nested(block: Any, x: Any) -> Any:
        return swap(lambda x: swap(block, x) * 2, x)

    blocks = make_blocks(world)
    expected = step(world, lambda block, x: block(x) * 2, blocks, (2, 0, 1))
    with late_copies():
        for call in (around, inside, nested):
            assert_equal(step(world, call, blocks, (2, 0, 1)), expected)
