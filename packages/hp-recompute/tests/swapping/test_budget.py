"""Layers stay within a budget of device memory, which is used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_platform.testing import World, distributed
from hp_recompute import swap
from hp_recompute.swapping.budget import LayerChoice, LayerCost, choose
from hp_recompute.swapping.fitted import FittedForward
from hp_recompute.swapping.late_copies import late_copies

sys.path.insert(0, str(Path(__file__).parent))

from swap_models import WIDTH, assert_equal, make_blocks, plain, real, step

ROWS = 64


def backward_of(world: World, blocks: list[Any]) -> None:
    platform = world.platform
    values = np.random.default_rng(3).uniform(-1, 1, (ROWS, WIDTH))
    x = platform.set_requires_grad_(platform.tensor(values, real(world), world.device), True)
    for block in blocks:
        x = block(x)
    platform.backward([platform.sum(x * x)])


def at_rate(budget: int, rate: float, forward_ms: float = 1.0, number: int = 6) -> list[tuple[str, int]]:
    costs = [LayerCost(str(place), 1000, forward_ms) for place in range(number)]
    plan = choose(costs, budget, rate)
    assert plan.peak_nbytes <= budget
    return [(each.choice, each.stays_nbytes) for each in plan.layers]


@pytest.mark.once
def test_the_last_layers_stay_and_the_first_ones_leave() -> None:
    assert at_rate(6000, 1e9) == [("keep", 1000)] * 6
    assert at_rate(3000, 1e9) == [("swap", 0)] * 3 + [("keep", 1000)] * 3
    assert at_rate(4500, 1e9) == [("swap", 0), ("swap", 500)] + [("keep", 1000)] * 4
    with pytest.raises(ValueError, match="is less than the 2000 bytes that two neighbouring layers need"):
        at_rate(1999, 1e9)


@pytest.mark.once
def test_what_cannot_be_copied_in_time_is_computed_again() -> None:
    assert [choice for choice, _ in at_rate(3000, 400.0)] == ["swap"] * 2 + ["recompute"] + ["keep"] * 3
    assert [choice for choice, _ in at_rate(3000, 1.0, forward_ms=2000.0)] == ["swap"] * 3 + ["keep"] * 3


@distributed(world_size=1)
def test_a_model_stays_within_its_budget_and_uses_it(world: World) -> None:
    platform = world.platform
    expected = step(world, plain, make_blocks(world, 6), (1, 0))
    with late_copies() as manager:
        blocks = make_blocks(world, 6)
        for block in blocks:
            for _, parameter in platform.named_parameters(block):
                platform.set_grad(parameter, None)
        first = swap(blocks, lambda: backward_of(world, blocks), device_budget_bytes=10**9)
        assert [each.choice for each in first.layers] == ["keep"] * 6
        saved = [each.cost.nbytes for each in first.layers]
        assert min(saved) > 0
    for part in (0.6, 0.75, 0.9):
        with late_copies() as manager:
            blocks, seen = make_blocks(world, 6), list[int]()
            budget = int(part * sum(saved))
            plan = swap(blocks, lambda blocks=blocks: backward_of(world, blocks), device_budget_bytes=budget)
            assert {each.choice for each in plan.layers} <= {"keep", "swap", "recompute"}
            assert 0.95 * budget <= plan.peak_nbytes <= budget, (str(plan), budget)
            look = lambda manager=manager, seen=seen: seen.append(manager.device_nbytes)
            for block in blocks:
                block.look = look
            backward_of(world, blocks)
            for block in blocks:
                block.look = None
            # Memories stay whole, so that a little less stays than the plan would let.
            assert 0.9 * budget <= max(seen) <= budget, (seen, budget, str(plan))
            assert f"of a budget of {budget / 2**20:.2f} MiB" in str(plan)
            assert len(str(plan).splitlines()) == 8
            assert_equal(step(world, plain, blocks, (1, 0)), expected)


@distributed(world_size=1)
def test_layers_of_every_choice_give_the_plain_numbers(world: World) -> None:
    expected = step(world, plain, make_blocks(world, 4), (0, 1))
    cost = LayerCost("layer", 1000, 1.0)
    with late_copies():
        blocks = make_blocks(world, 4)
        for block, choice, stays in zip(
            blocks, ("recompute", "swap", "recompute", "keep"), (0, 2000, 0, 10**6), strict=True
        ):
            forward = FittedForward(world.platform, world.device, LayerChoice(cost, choice, stays))
            world.platform.override_forward(block, forward)
        assert_equal(step(world, plain, blocks, (0, 1)), expected)


@distributed(world_size=1)
def test_wrong_budgets_are_told(world: World) -> None:
    blocks = make_blocks(world)
    run = lambda: backward_of(world, blocks)
    calls: list[tuple[Any, str]] = [
        (lambda: swap(blocks, run, device_budget_bytes=0), "a positive number of bytes, got 0"),
        (lambda: swap(blocks, run, device_budget_bytes="1G"), "a positive number of bytes, got '1G'"),
        (lambda: swap(blocks, device_budget_bytes=1), "takes a model and a function that does a step"),
        (lambda: swap([], run, device_budget_bytes=1), "or a list of its layers, which are modules"),
        (lambda: swap(3, run, device_budget_bytes=1), "or a list of its layers, got int"),
        (lambda: swap(blocks[0], run, device_budget_bytes=1), "has no ModuleList of several layers"),
        (lambda: swap(blocks, lambda: None, device_budget_bytes=1), "did not run all layers"),
    ]
    with late_copies():
        for call, message in calls:
            with pytest.raises(ValueError, match=message):
                call()
    if world.device_type == "cpu":
        with pytest.raises(NotImplementedError, match="has no memory of its own .*: use checkpoint"):
            swap(blocks, run, device_budget_bytes=10**9)
