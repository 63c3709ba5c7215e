"""Whoever catches an exception that left a forward finds shards and their memory alone, and training goes on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_fsdp import parts
from hp_platform.testing import World, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from failing_forwards import OnPurposeError, Training
from fsdp_models import sgd_step


class StopByHand(BaseException):
    """As KeyboardInterrupt: no Exception."""


PLACES = (
    "root, before units",
    "first unit",
    "outer unit, before the inner one",
    "inner unit",
    "inner unit, second call",
    "outer unit, after the inner one",
    "last unit",
    "root, after units",
)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=(1, 2))
def test_a_failure_anywhere_in_forward_leaves_shards_and_training_goes_on(
    world: World, reshard_after_forward: bool
) -> None:
    """In the first step, and later, when the next unit's gather is under way; with gradients and without."""
    training = Training(world, reshard_after_forward=reshard_after_forward)
    for place in PLACES:
        with training.fuse.blows(place):
            training.loss()
        training.check_shards()
        with world.platform.no_grad(), training.fuse.blows(place, StopByHand):
            training.loss()
        training.check_shards()
        sgd_step(world.platform, training.sharded)  # gradients are none: nothing is written
        training.train()


@distributed(world_size=4, backends=("torch", "cuda", "npu"))
def test_small_worlds_keep_nothing_after_a_failure(world: World) -> None:
    training = Training(world, reshard_after_forward=2)
    for place in ("inner unit", "last unit", "root, after units"):
        with training.fuse.blows(place):
            training.loss()
        training.check_shards()
        assert not any(unit.small_world.is_full for unit in training.units if unit.small_world is not None)
        training.train()


@distributed(world_size=2)
def test_parts_of_the_root_are_shards_after_a_failure(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MIN_NBYTES", 4 * 4 * 4)
        training = Training(world)
        training.train()
        if world.platform.supports("stand_ins", world.device):
            assert training.sharded._hp_fsdp_unit.parts
        for place in PLACES:
            with training.fuse.blows(place):
                training.loss()
            training.check_shards()
            training.train()


@distributed(world_size=2)
def test_hooks_of_the_user_may_fail_before_and_after_ours(world: World) -> None:
    platform, training = world.platform, Training(world)
    training.train()

    def fail(*_: Any) -> None:
        raise OnPurposeError("at a hook")

    for name in ("", "units.0", "units.1", "units.1.inside", "units.2", "last"):
        module = platform.get_submodule(training.sharded, name)
        for register in (
            lambda module: platform.register_forward_pre_hook(module, fail),
            lambda module: platform.register_forward_pre_hook(module, fail, prepend=True),
            lambda module: platform.register_forward_hook(module, fail),
            lambda module: platform.register_forward_hook(module, fail, prepend=True),
        ):
            handle = register(module)
            with pytest.raises(OnPurposeError):
                training.loss()
            handle.remove()
            training.check_shards()
        training.train()


@distributed(world_size=2)
def test_what_waits_for_its_backward_outlives_a_failed_forward(world: World) -> None:
    """Also where the call has failed before it began: then nothing is gathered again."""
    platform, training = world.platform, Training(world)
    training.train()
    training.backward(training.reference_loss(1))
    with count_collectives() as usual:
        training.backward(training.loss(1))
    training.check()
    training.finish(training.reference_loss(1) * 0.0)

    loss = training.loss(2)
    for place in PLACES:
        with training.fuse.blows(place):
            training.loss(3)
    training.backward(loss)
    training.finish(training.reference_loss(2))

    def fail(*_: Any) -> None:
        raise OnPurposeError("too early")

    with count_collectives() as counted:
        loss = training.loss(2)
        handle = platform.register_forward_pre_hook(training.sharded, fail, prepend=True)
        with pytest.raises(OnPurposeError):
            training.loss(3)
        handle.remove()
        training.backward(loss)
    training.finish(training.reference_loss(2))
    assert counted.counts == usual.counts


@distributed(world_size=2)
def test_failures_at_different_places_on_the_ranks_concern_each_alone(world: World) -> None:
    """Between collectives: all ranks have launched the same, also of units that they have looked ahead to."""
    training, is_first = Training(world), world.rank == 0

    def fail(*_: Any) -> None:
        raise OnPurposeError("at first unit")

    for _ in range(2):
        training.train()
        handle = None
        if not is_first:
            outer = training.sharded.units[1]
            handle = world.platform.register_forward_pre_hook(outer, fail, prepend=True)
        with training.fuse.blows("first unit" if is_first else ""):
            training.loss()
        if handle is not None:
            handle.remove()
        training.check_shards()
        training.train()
        with training.fuse.blows("root, after units" if is_first else "last unit"):
            training.loss()
        training.check_shards()


@distributed(world_size=2)
def test_a_failure_on_one_rank_concerns_that_rank_alone(world: World) -> None:
    training = Training(world)
    for _ in range(2):
        if world.rank == 0:
            with training.fuse.blows("root, after units"):  # the others' forward is done by then
                training.loss()
            training.check_shards()
        else:
            training.loss()
        training.train()
