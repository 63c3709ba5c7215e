"""Swap of units that fully_shard shards, and of DTensors: the bits of those that are not swapped."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor import Replicate, Shard, distribute_tensor, manual_seed
from hp_dtensor import random as hp_random
from hp_platform import init_device_mesh
from hp_platform.testing import World, count_collectives, distributed
from hp_recompute import CheckpointPolicy, checkpoint_wrapper, swap, swap_wrapper
from hp_recompute.swapping.late_copies import late_copies

sys.path.insert(0, str(Path(__file__).parent))
from recompute_parts import assert_equal, in_units, stack, whole, widest


def make_model(world: World) -> Any:
    """Four blocks with dropout, and a frozen weight in each."""
    platform, random = world.platform, np.random.default_rng(0)

    class Block(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, shape in {"up": (8, 5), "down": (5, 8), "frozen": (5, 5)}.items():
                values = platform.tensor(random.uniform(-1, 1, shape), widest(world), world.device)
                setattr(self, name, platform.parameter(values, requires_grad=name != "frozen"))

        def forward(self, x: Any) -> Any:
            middle = platform.gelu(platform.linear(platform.sin(x), self.up))
            dropped = hp_random.dropout(middle, 0.5)
            return x + platform.linear(platform.linear(dropped, self.down), self.frozen)

    return stack(world, Block, 4)


def gradients(world: World, model: Any, order: tuple[int, ...]) -> list[Any]:
    """After the forward of as many micro-batches, and their backward in this order."""
    platform = world.platform
    manual_seed(3)
    random = np.random.default_rng(world.rank)
    inputs = [
        platform.set_requires_grad_(
            platform.tensor(random.uniform(-1, 1, (3, 5)), widest(world), world.device), True
        )
        for _ in order
    ]
    for _, parameter in platform.named_parameters(model):
        platform.set_grad(parameter, None)
    losses = [platform.sum(y * y) for y in [model(x) for x in inputs]]
    for index in order:
        platform.backward([losses[index]])
    leaves = [*inputs, *(p for _, p in platform.named_parameters(model) if platform.requires_grad(p))]
    return [platform.to_numpy(whole(platform.get_grad(x))) for x in leaves]


WRAPS = {
    "swap": swap_wrapper,
    "packed": lambda block: swap_wrapper(block, group_swap=True),
    "inputs of checkpoints": lambda block: checkpoint_wrapper(block, swap_inputs=True),
}


@pytest.mark.parametrize("name", WRAPS)
@distributed(world_size=2)
def test_units_that_are_swapped_give_the_bits_of_those_that_are_not(world: World, name: str) -> None:
    for order in ((0,), (1, 0, 2)):
        plain = in_units(world, make_model(world))
        with count_collectives() as expected_count:
            expected = gradients(world, plain, order)
        for inside in (True, False):
            for reshard in (True, False):
                model = in_units(
                    world, make_model(world), WRAPS[name], inside=inside, reshard_after_forward=reshard
                )
                with late_copies() as manager:
                    for _ in range(2):
                        with count_collectives() as counted:
                            found = gradients(world, model, order)
                        assert_equal(found, expected)
                    assert manager.host_nbytes > 0
                if reshard and name != "inputs of checkpoints":
                    assert counted.counts == expected_count.counts


@distributed(world_size=2)
def test_gathered_parameters_are_not_swapped(world: World) -> None:
    asked: set[tuple[int, ...]] = set()

    def policy(x: Any) -> Any:
        asked.add(tuple(x.shape))
        return CheckpointPolicy.MUST_SWAP

    for reshard in (True, False):
        for inside in (True, False):
            model = in_units(
                world,
                make_model(world),
                lambda block: swap_wrapper(block, policy),
                inside=inside,
                reshard_after_forward=reshard,
            )
            with late_copies():
                gradients(world, model, (0,))
    trained = {(8, 5), (5, 8)}
    assert asked
    # A framework that does not tell what a tensor is a view of cannot leave out views of gathered parameters: they go along.
    a_view = world.platform.narrow(world.platform.zeros((2, 2), "float32", world.device), 0, 0, 1)
    if world.platform.view_base(a_view) is not None:
        assert not asked & trained


@distributed(world_size=2)
def test_arguments_and_outputs_may_be_dtensors(world: World) -> None:
    platform = world.platform
    mesh = init_device_mesh(world.device_type, (world.size,))
    found = []
    for run in (swap, lambda function, *args: function(*args)):
        values = platform.tensor(np.linspace(-1, 1, 20).reshape(5, 4), widest(world), world.device)
        x = distribute_tensor(values, mesh, [Replicate()])
        weight = distribute_tensor(values, mesh, [Shard(0)])
        for leaf in (x, weight):
            platform.set_requires_grad_(leaf, True)

        def function(given: dict[str, Any], weight: Any = weight) -> dict[str, Any]:
            middle = platform.sin(given["x"]) @ platform.transpose(weight, 0, 1)
            return {"x": platform.sin(middle) @ weight}

        with late_copies() as manager:
            y = {"x": x * 1}
            for _ in range(3):
                y = run(function, y)
            assert (manager.host_nbytes > 0) == (run is swap)
            y["x"].sum().backward()
        found.append([platform.to_numpy(whole(leaf.grad)) for leaf in (x, weight)])
    assert_equal(found[0], found[1])


@distributed(world_size=2)
def test_units_under_a_budget_give_the_bits_of_those_without(world: World) -> None:
    expected = {
        order: gradients(world, in_units(world, make_model(world)), order) for order in ((0,), (1, 0, 2))
    }
    model = in_units(world, make_model(world))
    with late_copies() as manager:
        run = lambda: gradients(world, model, (0,))
        saved = sum(each.cost.nbytes for each in swap(model, run, device_budget_bytes=10**9).layers)
        plan = swap(model, run, device_budget_bytes=int(0.6 * saved))
        assert plan.peak_nbytes <= 0.6 * saved
        assert {each.choice for each in plan.layers} & {"swap", "recompute"}
        for order, numbers in expected.items():
            for _ in range(2):
                assert_equal(gradients(world, model, order), numbers)
        assert manager.device_nbytes == 0
