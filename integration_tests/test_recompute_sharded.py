"""Checkpoints of sharded units, of layers in tensor parallel styles, and of functions of DTensors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor import Partial, Replicate, Shard, distribute_tensor, manual_seed
from hp_dtensor import random as hp_random
from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_platform import init_device_mesh
from hp_platform.testing import World, count_collectives, distributed
from hp_recompute import checkpoint, checkpoint_wrapper

sys.path.insert(0, str(Path(__file__).parent))
from recompute_parts import assert_equal, in_styles, in_units, stack_of_two_layers, whole, widest


def make_model(world: World) -> Any:
    """Three blocks of two layers with dropout, whose masks do not depend on the sharding."""
    platform = world.platform
    return stack_of_two_layers(
        world,
        lambda block, x: x + block.down(platform.silu(hp_random.dropout(block.up(x), 0.25))),
        num_blocks=3,
    )


def gradients(world: World, model: Any, order: tuple[int, ...] = (0,)) -> list[Any]:
    """After the forward of as many micro-batches, and their backward in this order."""
    platform = world.platform
    manual_seed(3)
    random = np.random.default_rng(world.rank)
    inputs = [
        platform.set_requires_grad_(
            platform.tensor(random.uniform(-1, 1, (3, 4)), widest(world), world.device), True
        )
        for _ in order
    ]
    outputs = [model(x) for x in inputs]
    losses = [platform.sum(y * y) for y in outputs]
    for index in order:
        platform.backward([losses[index]])
    found = [platform.get_grad(x) for x in inputs]
    found.extend(platform.get_grad(p) for _, p in platform.named_parameters(model))
    return [platform.to_numpy(whole(x)) for x in found]


@distributed(world_size=(1, 2))
def test_units_that_are_checkpointed_give_the_bits_of_those_that_are_not(world: World) -> None:
    for order in ((0,), (1, 0, 2)):
        expected = gradients(world, in_units(world, make_model(world)), order)
        for inside in (True, False):
            for reshard in (True, False):
                model = in_units(
                    world, make_model(world), checkpoint_wrapper, inside=inside, reshard_after_forward=reshard
                )
                assert_equal(gradients(world, model, order), expected)
                assert_equal(gradients(world, model, order)[: len(order)], expected[: len(order)])


@distributed(world_size=2)
def test_units_that_compute_in_another_dtype_cast_in_both_runs(world: World) -> None:
    narrow = "float32" if widest(world) == "float64" else "bfloat16"
    policy = MixedPrecisionPolicy(param_dtype=world.platform.dtype(narrow))
    expected = gradients(world, in_units(world, make_model(world), mp_policy=policy), (1, 0))
    wide = gradients(world, in_units(world, make_model(world)), (1, 0))
    assert not np.array_equal(expected[0], wide[0])
    for inside in (True, False):
        model = in_units(world, make_model(world), checkpoint_wrapper, inside=inside, mp_policy=policy)
        assert_equal(gradients(world, model, (1, 0)), expected)


@distributed(world_size=2)
def test_units_inside_of_a_checkpointed_function_gather_again(world: World) -> None:
    expected = gradients(world, in_units(world, make_model(world)))
    mesh = init_device_mesh(world.device_type, (world.size,))
    model = make_model(world)
    for block in model.blocks:
        fully_shard(block, mesh)
    fully_shard(model, mesh)
    platform, blocks = world.platform, model.blocks

    def two(x: Any) -> Any:
        return blocks[1](blocks[0](x))

    manual_seed(3)
    values = np.random.default_rng(world.rank).uniform(-1, 1, (3, 4))
    x = platform.set_requires_grad_(platform.tensor(values, widest(world), world.device), True)
    y = blocks[2](checkpoint(two, x))
    platform.backward([platform.sum(y * y)])
    assert_equal([platform.to_numpy(platform.get_grad(x))], expected[:1])


@distributed(world_size=2)
def test_layers_in_styles_communicate_again_only_what_something_is_saved_after(world: World) -> None:
    counts, found = [], []
    for wrap in (
        lambda block: None,
        checkpoint_wrapper,
        lambda block: checkpoint_wrapper(block, early_stop=False),
    ):
        model = in_styles(world, make_model(world), wrap)
        with count_collectives() as counted:
            found.append(gradients(world, model))
        counts.append(counted.counts["all_reduce"])
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])
    # A block ends in a reduction and a sum, which save nothing: with early stop it is not done again.
    assert counts[1] == counts[0], counts
    assert counts[2] == counts[1] + 3


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
@distributed(world_size=2)
def test_arguments_may_be_dtensors(world: World, placement: Any) -> None:
    platform = world.platform
    mesh = init_device_mesh(world.device_type, (world.size,))
    found = []
    for run in (checkpoint, lambda function, *args, **kwargs: function(*args, **kwargs)):
        values = platform.tensor(np.linspace(-1, 1, 20).reshape(5, 4), widest(world), world.device)
        x = distribute_tensor(values, mesh, [Replicate() if placement.is_partial() else placement])
        platform.set_requires_grad_(x, True)
        middle = x.redistribute(placements=[placement]) if placement.is_partial() else x * 1
        weight = distribute_tensor(values, mesh, [Shard(0)])
        platform.set_requires_grad_(weight, True)

        def function(given: Any, *, weight: Any) -> Any:
            inner = platform.sin(given["x"]) @ platform.transpose(weight, 0, 1)
            return platform.sin(inner) * given["scale"]

        y = run(function, {"x": middle, "scale": 2.0}, weight=weight)
        y.sum().backward()
        found.append([platform.to_numpy(whole(grad)) for grad in (x.grad, weight.grad)])
    assert_equal(found[0], found[1])
