"""Training goes on after failures in forward and backward of any unit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import tolerance
from turns import NUM_UNITS, OnPurposeError, Pair, fail, fail_in_backward, fail_in_forward, loss_of_rank


@pytest.mark.parametrize("at", range(NUM_UNITS))
@distributed(world_size=2)
def test_training_goes_on_after_a_failure_in_the_forward_of_any_unit(world: World, at: int) -> None:
    """With the next unit's gather under way; and nothing is left behind."""
    platform = world.platform
    pair = Pair(world)
    pair.backward(0)  # from the second step on units are gathered ahead
    pair.step()
    for register in (platform.register_forward_pre_hook, platform.register_forward_hook):
        handle = register(pair.model.blocks[at], fail)
        with pytest.raises(OnPurposeError):
            pair.loss(1)
        with platform.no_grad(), pytest.raises(OnPurposeError):
            pair.loss(1)
        handle.remove()
        pair.backward(1)
        pair.check()
        pair.step()
        pair.check_freed()
    with platform.no_grad():
        assert_parity(pair.loss(2), loss_of_rank(pair, 2), **tolerance(world))
    pair.check_freed()


@pytest.mark.parametrize("at", range(NUM_UNITS))
@distributed(world_size=2)
def test_training_goes_on_after_a_failure_in_the_backward_of_any_unit(world: World, at: int) -> None:
    """With gathers ahead and reductions of later units under way."""
    pair = Pair(world)
    pair.backward(0)
    pair.step()

    fail_in_backward(pair, at, 1)
    pair.model.zero_grad()
    for batch in (2, 3):
        pair.backward(batch)
        pair.check()
        pair.step()
        pair.check_freed()


@distributed(world_size=2)
def test_a_failure_in_one_model_does_not_touch_another(world: World) -> None:
    first, second = Pair(world, 0), Pair(world, 1)
    for pair in (first, second):
        pair.backward(0)
        pair.step()
    pending = second.loss(1)
    fail_in_forward(first, 2, 1)
    world.platform.backward([pending])
    world.platform.backward([second.reference_loss(1)])
    second.check()
    second.check_freed()
    first.backward(1)
    first.check()
    first.check_freed()
