"""The course of a step and its variations: accumulation, several forwards, dropped losses, failures, odd outputs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_fsdp import fully_shard
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import (
    PROGRAMS,
    Maker,
    local,
    loss_of,
    make_mesh,
    numpy_of,
    tolerance,
    whole,
)
from twins import Twins


@pytest.mark.parametrize("name", ["mlp", "branches", "scalars", "tied"])
@distributed(world_size=2)
def test_gradients_of_several_backwards_add_up(world: World, name: str) -> None:
    twins = Twins(world, name)
    for batch in range(3):
        twins.backward(twins.loss(batch))
        twins.backward(twins.reference_loss(batch))
    twins.check()


@pytest.mark.parametrize("name", ["mlp", "branches", "scalars", "tied"])
@distributed(world_size=2)
def test_without_synchronisation_gradients_wait_whole_and_then_add_up(world: World, name: str) -> None:
    twins, platform = Twins(world, name), world.platform
    for batch in range(3):
        twins.sharded.set_requires_gradient_sync(batch == 2)
        twins.backward(twins.loss(batch))
        twins.backward(twins.reference_loss(batch))
        if batch < 2:
            assert all(platform.get_grad(p) is None for _, p in platform.named_parameters(twins.sharded))
    twins.check()


@distributed(world_size=2)
def test_a_unit_that_only_ran_without_synchronisation_is_reduced_with_the_others(world: World) -> None:
    platform = world.platform

    def build() -> Any:
        maker = Maker(world)

        def setup(module: Any) -> None:
            module.choices = platform.ModuleList([maker.block(4, 5), maker.block(4, 5)])

        return maker.model(setup, lambda module, x, which: module.choices[which](x))

    reference, model, mesh = build(), build(), make_mesh(world)
    shapes = {n: tuple(p.shape) for n, p in platform.named_parameters(reference)}
    for choice in model.choices:
        fully_shard(choice, mesh)
    fully_shard(model, mesh)
    for which in (0, 1):
        model.set_requires_gradient_sync(which == 1)
        inputs = PROGRAMS["mlp"].inputs(Maker(world), 0, which)  # the same on all ranks
        for each in (reference, model):
            platform.backward([loss_of(platform, each(inputs, which))])
    assert_parity(
        whole(world, model, shapes, mesh, platform.get_grad),
        numpy_of(platform, reference, platform.get_grad),
        **tolerance(world),
    )


@distributed(world_size=2)
def test_two_forwards_and_then_two_backwards_in_either_order(world: World) -> None:
    for order in ((0, 1), (1, 0)):
        twins = Twins(world)
        losses = [twins.loss(0), twins.loss(1)]
        for place in order:
            twins.backward(losses[place])
        for batch in range(2):
            twins.backward(twins.reference_loss(batch))
        twins.check()


@distributed(world_size=2)
def test_two_forwards_and_one_backward_over_both(world: World) -> None:
    for name in ("mlp", "twice"):
        twins = Twins(world, name)
        twins.backward(twins.loss(0) + twins.loss(1))
        twins.backward(twins.reference_loss(0) + twins.reference_loss(1))
        twins.check()


@distributed(world_size=2)
def test_a_forward_whose_loss_is_dropped_leaves_no_old_parameters_behind(world: World) -> None:
    for options in ({}, {"reshard_after_forward": False}):
        twins = Twins(world, **options)
        twins.loss(0)  # the root keeps its parameters for a backward that never comes
        for batch in (1, 2):
            twins.backward(twins.loss(batch))
            twins.backward(twins.reference_loss(batch))
            dropped = twins.loss(batch)
            twins.step()
            assert dropped is not None
        twins.check("parameters")


@distributed(world_size=2)
def test_evaluation_between_training_steps_sees_the_present_parameters(world: World) -> None:
    twins, platform = Twins(world), world.platform
    for batch in range(2):
        twins.backward(twins.loss(batch))
        twins.backward(twins.reference_loss(batch))
        with platform.no_grad():
            twins.loss(batch)
        twins.step()
        inputs = twins.program.inputs(Maker(world), world.rank, batch)
        with platform.no_grad():
            assert_parity(twins.sharded(inputs), twins.reference(inputs), **tolerance(world))
    twins.check("parameters")


@distributed(world_size=2)
def test_a_graph_that_is_kept_can_be_walked_twice(world: World) -> None:
    twins, platform = Twins(world), world.platform
    for loss in (twins.loss(0), twins.reference_loss(0)):
        platform.backward([loss], retain_graph=True)
        platform.backward([loss])
    twins.check()


@distributed(world_size=2)
def test_training_goes_on_after_a_forward_that_failed(world: World) -> None:
    twins, platform = Twins(world), world.platform
    block = platform.get_submodule(twins.sharded, "blocks.1")

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle of forward")

    handle = platform.register_forward_pre_hook(block, fail)
    with pytest.raises(RuntimeError, match="in the middle of forward"):
        twins.loss(0)
    handle.remove()
    for batch in range(2):
        twins.backward(twins.loss(batch))
        twins.backward(twins.reference_loss(batch))
        twins.step()
    twins.check("parameters")


@distributed(world_size=2)
def test_training_goes_on_after_a_backward_that_failed(world: World) -> None:
    twins, platform = Twins(world), world.platform
    inputs = platform.set_requires_grad_(twins.program.inputs(Maker(world), world.rank, 0), True)

    def fail(_: Any) -> None:
        raise RuntimeError("in the middle of backward")

    platform.register_tensor_hook(inputs, fail)
    with pytest.raises(RuntimeError, match="in the middle of backward"):
        twins.backward(loss_of(platform, twins.sharded(inputs)))
    twins.sharded.zero_grad()
    for batch in range(2):
        twins.backward(twins.loss(batch))
        twins.backward(twins.reference_loss(batch))
        twins.step()
    twins.check("parameters")


@distributed(world_size=2)
def test_zero_grad_clears_everything_also_between_forward_and_backward(world: World) -> None:
    twins, platform = Twins(world), world.platform
    shards = dict(platform.named_parameters(twins.sharded))
    twins.backward(twins.loss(0))
    loss = twins.loss(1)
    twins.sharded.zero_grad()
    assert all(platform.get_grad(p) is None for p in shards.values())
    twins.backward(loss)
    twins.backward(twins.reference_loss(1))
    twins.check()
    twins.sharded.zero_grad(set_to_none=False)
    assert all(not platform.to_numpy(platform.get_grad(local(p))).any() for p in shards.values())


@distributed(world_size=2)
def test_freezing_between_steps_is_seen(world: World) -> None:
    twins, platform = Twins(world), world.platform
    for model in (twins.reference, twins.sharded):
        twins.backward(twins.loss(0) if model is twins.sharded else twins.reference_loss(0))
    twins.step()
    for model in (twins.reference, twins.sharded):
        for name, parameter in platform.named_parameters(model):
            if name.startswith("blocks.0"):
                platform.set_requires_grad_(parameter, False)
    twins.backward(twins.loss(1))
    twins.backward(twins.reference_loss(1))
    twins.check()
    twins.step()
    twins.check("parameters")
