"""Layers stay within a budget of device memory, which is used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_platform import split_group
from hp_platform.collectives import all_gather_object
from hp_platform.testing import World, count_collectives, distributed
from hp_recompute import swap
from hp_recompute.swapping.budget import BudgetPlan
from hp_recompute.swapping.choices import LayerChoice, LayerCost
from hp_recompute.swapping.fitted import MARK, FittedForward, FittedLayers
from hp_recompute.swapping.late_copies import late_copies
from hp_recompute.swapping.timetable import Rates, timetable

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


@distributed(world_size=1)
def test_a_model_stays_within_its_budget_and_uses_it(world: World) -> None:
    platform = world.platform
    expected = step(world, plain, make_blocks(world, 6), (1, 0))
    with late_copies() as manager:
        blocks = make_blocks(world, 6)
        first = swap(blocks, lambda: backward_of(world, blocks), device_budget_bytes=10**9)
        assert [each.choice for each in first.layers] == ["keep"] * 6
        saved = [each.cost.nbytes for each in first.layers]
        assert min(saved) > 0 and first.added_ms == 0
        assert all(0 < each.cost.inputs_nbytes < each.cost.nbytes for each in first.layers[1:])
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
                for _, parameter in platform.named_parameters(block):
                    platform.set_grad(parameter, None)
            backward_of(world, blocks)
            for block in blocks:
                block.look = None
            assert 0.95 * budget <= max(seen) <= budget, (seen, budget, str(plan))
            assert f"of a budget of {budget / 2**20:.2f} MiB" in str(plan)
            assert len(str(plan).splitlines()) == 8
            assert_equal(step(world, plain, blocks, (1, 0)), expected)


@distributed(world_size=1)
def test_layers_of_every_choice_give_the_plain_numbers(world: World) -> None:
    expected = step(world, plain, make_blocks(world, 6), (0, 1))
    cost, rates = LayerCost("layer", 10**6, 1.0, 1000), Rates(1e6, 1e6)
    choices = [
        LayerChoice(cost, choice, stays)
        for choice, stays in (
            ("recompute", 0),
            ("swap", 2000),
            ("swap", 0),
            ("recompute", 0),
            ("swap", 0),
            ("keep", 10**6),
        )
    ]
    for budget in (10**6, 2 * 10**6, 10**7):  # copies are waited for early, later, and never
        table = timetable(choices, budget + 4000, rates)
        assert table is not None
        with late_copies() as manager:
            blocks = make_blocks(world, 6)
            swap(blocks, lambda blocks=blocks: backward_of(world, blocks), device_budget_bytes=10**9)
            fitted = FittedLayers(world.device, BudgetPlan(tuple(choices), budget + 4000, rates, table))
            for place, block in enumerate(blocks):
                setattr(block, MARK, FittedForward(fitted, place))
            for _ in range(2):
                assert_equal(step(world, plain, blocks, (0, 1)), expected)
            with world.platform.no_grad():
                blocks[0](world.platform.zeros((4, WIDTH), real(world), world.device))
            assert_equal(step(world, plain, blocks, (0, 1)), expected)
            assert manager.device_nbytes == 0


@distributed(world_size=1)
def test_what_a_plan_fetched_for_a_backward_that_does_not_come_is_given_back(world: World) -> None:
    platform = world.platform
    expected = step(world, plain, make_blocks(world, 6), (0,))
    cost, rates = LayerCost("layer", 10**6, 1.0, 1000), Rates(1e6, 1e6)
    choices = tuple(
        LayerChoice(cost, choice, stays) for choice, stays in [("swap", 0)] * 3 + [("keep", 10**6)] * 3
    )
    table = timetable(choices, 5 * 10**6, rates)
    assert table is not None and table.fetches[3] == table.left_at_end == (0,)
    with late_copies() as manager:
        blocks = make_blocks(world, 6)
        swap(blocks, lambda: backward_of(world, blocks), device_budget_bytes=10**9)
        fitted = FittedLayers(world.device, BudgetPlan(choices, 5 * 10**6, rates, table))
        for place, block in enumerate(blocks):
            setattr(block, MARK, FittedForward(fitted, place))
        ys = [platform.set_requires_grad_(platform.full((ROWS, WIDTH), 0.5, real(world), world.device), True)]
        for number, block in enumerate(blocks):
            manager.set_current_group_name(f"layer {number}")
            ys.append(block(ys[-1]))
        manager.set_current_group_name(None)
        before = manager.group_nbytes("layer 0")
        assert before[0] == 0 < before[1]
        platform.grad([platform.sum(ys[-1])], [ys[3]], retain_graph=True)
        assert manager.group_nbytes("layer 0")[0] == before[1]
        swap(platform.sin, ys[0])
        assert manager.group_nbytes("layer 0") == before
        del ys
        assert_equal(step(world, plain, blocks, (0,)), expected)


@distributed(world_size=1)
def test_another_budget_replaces_the_one_before_and_a_step_that_fails_leaves_none(world: World) -> None:
    expected = step(world, plain, make_blocks(world), (0,))
    with late_copies() as manager:
        blocks = make_blocks(world)
        run = lambda: backward_of(world, blocks)
        whole = swap(blocks, run, device_budget_bytes=10**9)
        saved = sum(each.cost.nbytes for each in whole.layers)
        tight = swap(blocks, run, device_budget_bytes=int(0.7 * saved))
        assert {each.choice for each in tight.layers} != {"keep"}
        again = swap(blocks, run, device_budget_bytes=10**9)
        assert [each.cost.nbytes for each in again.layers] == [each.cost.nbytes for each in whole.layers]
        assert_equal(step(world, plain, blocks, (0,)), expected)
        assert manager.host_nbytes == 0  # what it took to measure was given back

        def fails() -> None:
            raise KeyError("a step")

        with pytest.raises(KeyError):
            swap(blocks, fails, device_budget_bytes=10**9)
        assert_equal(step(world, plain, blocks, (0,)), expected)
        assert manager.host_nbytes == 0


@distributed(world_size=2)
def test_ranks_come_to_the_same_plan(world: World) -> None:
    expected = step(world, plain, make_blocks(world, 4), (0,))
    with late_copies():
        blocks = make_blocks(world, 4)
        run = lambda: backward_of(world, blocks)
        whole = swap(blocks, run, device_budget_bytes=10**9)
        saved = sum(each.cost.nbytes for each in whole.layers)
        with count_collectives() as counted:
            plan = swap(blocks, run, device_budget_bytes=int(0.6 * saved) + 1000 * world.rank)
        assert dict(counted.counts) == {"all_gather": 2}  # of lengths, and of what was measured
        assert plan.device_budget_bytes == int(0.6 * saved)
        assert len(set(all_gather_object(str(plan)))) == 1
        assert_equal(step(world, plain, blocks, (0,)), expected)
        alone = split_group(split_ranks=[[rank] for rank in range(world.size)])
        mine = swap(blocks, run, device_budget_bytes=10**9 + world.rank, process_group=alone)
        assert mine.device_budget_bytes == 10**9 + world.rank
        fewer = blocks[: 4 - world.rank]
        with pytest.raises(ValueError, match=r"which have \[4, 3\] layers: give process_group"):
            swap(fewer, run, device_budget_bytes=10**9)


@distributed(world_size=1)
def test_wrong_budgets_are_told(world: World) -> None:
    blocks = make_blocks(world)
    run = lambda: backward_of(world, blocks)
    calls: list[tuple[Any, str]] = [
        (lambda: swap(blocks, run, device_budget_bytes=0), "a positive number of bytes, got 0"),
        (lambda: swap(blocks, run, device_budget_bytes="1G"), "a positive number of bytes, got '1G'"),
        (lambda: swap(blocks, device_budget_bytes=1), "takes a model and a function that does a step"),
        (
            lambda: swap(blocks, run, device_budget_bytes=1, policy_fn=print),
            "chooses itself what is swapped: leave policy_fn and group_swap out",
        ),
        (
            lambda: swap(blocks, run, device_budget_bytes=1, group_swap=True),
            "chooses itself what is swapped: leave policy_fn and group_swap out",
        ),
        (
            lambda: swap([world.platform.Module()], run, device_budget_bytes=1),
            "these 1 have none: give the layers of the model",
        ),
        (
            lambda: swap(blocks, run, 3, device_budget_bytes=1),
            "takes a model and a function that does a step",
        ),
        (
            lambda: swap(blocks, run, device_budget_bytes=1, group=None),
            "takes a model and a function that does a step",
        ),
        (
            lambda: swap(blocks, run, device_budget_bytes=9, process_group=3),
            "expected a hp_platform.ProcessGroup",
        ),
        (lambda: swap([], run, device_budget_bytes=1), "or a list of its layers, which are modules"),
        (lambda: swap(3, run, device_budget_bytes=1), "or a list of its layers, got int"),
        (lambda: swap(blocks[0], run, device_budget_bytes=1), "has no ModuleList of several layers"),
        (lambda: swap(blocks, lambda: None, device_budget_bytes=1), "did not run all layers"),
        (
            lambda: swap(blocks, run, device_budget_bytes=1),
            "bytes that backward needs at the same time for one layer",
        ),
    ]
    with late_copies():
        for call, message in calls:
            with pytest.raises(ValueError, match=message):
                call()
    if world.device_type == "cpu":
        with pytest.raises(NotImplementedError, match="has no memory of its own .*: use checkpoint"):
            swap(blocks, run, device_budget_bytes=10**9)
