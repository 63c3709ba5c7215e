"""Which layers keep, swap and compute again what they save, and when it travels: by measured costs, without a framework."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_recompute.swapping.agreed import Measured, agree
from hp_recompute.swapping.budget import BudgetPlan, choose
from hp_recompute.swapping.choices import LayerChoice, LayerCost, fitting
from hp_recompute.swapping.timetable import Rates, timetable

pytestmark = pytest.mark.once


def plan_of(budget: int, rate: float, forward_ms: float = 1.0, number: int = 6) -> BudgetPlan:
    costs = [LayerCost(str(place), 1000, forward_ms) for place in range(number)]
    return choose(costs, budget, Rates(rate, rate))


def choices(plan: BudgetPlan) -> list[tuple[str, int]]:
    return [(each.choice, each.stays_nbytes) for each in plan.layers]


def test_the_last_layers_stay_and_the_first_ones_leave() -> None:
    assert choices(plan_of(6000, 1e9)) == [("keep", 1000)] * 6
    assert choices(plan_of(3000, 1e9)) == [("swap", 0)] * 3 + [("keep", 1000)] * 3
    assert choices(plan_of(4500, 1e9)) == [("swap", 0), ("swap", 500)] + [("keep", 1000)] * 4
    assert plan_of(4500, 1e9).added_ms == pytest.approx(0, abs=1e-3)


def test_a_budget_that_one_layer_exceeds_is_told() -> None:
    assert plan_of(1000, 1e9).peak_nbytes == 1000
    with pytest.raises(
        ValueError, match="999 is less than the 1000 bytes that backward needs .* for one layer"
    ):
        plan_of(999, 1e9)
    costs = [LayerCost("small", 100, 1.0), LayerCost("large", 900, 1.0, 50), LayerCost("last", 100, 1.0, 99)]
    assert choose(costs, 999, Rates(1e9, 1e9)).peak_nbytes <= 999
    for budget, spare, least in ((998, 0.0, 999), (1000, 0.1, 1110)):
        with pytest.raises(ValueError, match=f"{budget} is less than the {least} bytes"):
            choose(costs, budget, Rates(1e9, 1e9), spare)


def test_a_part_of_the_budget_may_be_left_alone() -> None:
    plan = choose([LayerCost(str(place), 1000, 1.0) for place in range(6)], 5000, Rates(1e9, 1e9), spare=0.1)
    assert (plan.device_budget_bytes, plan.peak_nbytes) == (5000, 4500)


def test_the_gradient_of_an_output_counts_while_backward_passes() -> None:
    cost = LayerCost("layer", 1000, 1.0, 100)
    layers = [
        LayerChoice(cost, "swap", 0),
        LayerChoice(cost, "recompute", 0),
        LayerChoice(cost, "keep", 1000),
    ]
    table = timetable(layers, 10**6, Rates(1e9, 1e9))
    # While the second layer runs backward: what the first one had saved, what it computes again, and the gradient.
    assert table is not None and table.loads == (1100, 2100, 2100)


def test_what_cannot_be_copied_in_time_is_computed_again() -> None:
    # A copy takes three forwards: the first ends at 4, and the second at 7, when the last layer should have begun for two. To wait for it is
    # as long as to compute that layer again and another one, which copies less.
    plan = plan_of(3000, 1000 / 3)
    assert [each.choice for each in plan.layers] == ["swap"] + ["recompute"] * 2 + ["keep"] * 3
    assert plan.added_ms == pytest.approx(2.0)
    faster = plan_of(3000, 1000 / 2.25)
    assert [each.choice for each in faster.layers] == ["swap"] * 2 + ["recompute"] + ["keep"] * 3
    assert faster.added_ms == pytest.approx(1.5)
    # Computing again would take longer than any copy.
    slow = plan_of(3000, 1.0, forward_ms=2000.0)
    assert [each.choice for each in slow.layers] == ["swap"] * 3 + ["keep"] * 3
    # Without a link that is worth it nothing is copied, and what one layer less needs is not used.
    assert [each.choice for each in plan_of(3999, 1e-3).layers] == ["recompute"] * 3 + ["keep"] * 3


def test_a_copy_that_fits_behind_a_step_adds_nothing() -> None:
    plan = plan_of(5000, 1000 / 4)
    assert choices(plan) == [("swap", 0)] + [("keep", 1000)] * 5
    assert plan.timetable.left_at_end == (0,)
    assert plan.timetable.fetches[4] == (0,) and plan.timetable.loads == (1000, 2000, 3000, 4000, 5000, 5000)
    assert plan.added_ms == pytest.approx(0)
    assert plan_of(5000, 1000 / 5).added_ms == pytest.approx(1.0)  # or the layer is computed again


def test_the_time_is_that_of_the_link_where_copies_are_longer() -> None:
    cost = LayerCost("layer", 1000, 1.0, 0, (1000,))
    layers = [LayerChoice(cost, "swap", 0)] * 2 + [LayerChoice(cost, "keep", 1000)]
    # Copies to the host take 5 ms, and the others 2 ms. Memory moves as a whole: each layer begins when the one before has left, at
    # 1 + 5 and at 7 + 5, and backward at 13. After 2 ms of the last one both others wait for a copy of 2 ms.
    table = timetable(layers, 1000, Rates(200.0, 500.0))
    assert table is not None and table.left_at_end == (0, 1) and table.fetches == ((), (), ())
    assert table.added_ms == pytest.approx(5 + 5 + 2 + 2)
    # With room for two, the first copy may take its time, which ends at 6, and the second one need not end: what it copies stays there.
    # Backward of the two ends at 7 + 2 + 2, and the fetch, which begins at 11 behind the second copy, at 13.
    table = timetable(layers, 2000, Rates(200.0, 500.0))
    assert table is not None and table.left_at_end == (0,) and table.fetches == ((), (0,), ())
    assert table.added_ms == pytest.approx(13 + 2 - 9)
    # With room for all nothing has to leave.
    table = timetable(layers, 3000, Rates(200.0, 500.0))
    assert (
        table is not None and table.left_at_end == () and table.fetches == ((),) * 3 and table.added_ms == 0
    )
    assert timetable(layers, 999, Rates(200.0, 500.0)) is None


def test_a_layer_waits_for_as_much_as_it_saves() -> None:
    small, large = LayerCost("small", 250, 1.0), LayerCost("large", 1000, 1.0)
    layers = [LayerChoice(large, "swap", 0), LayerChoice(small, "keep", 250), LayerChoice(small, "keep", 250)]
    # A copy of 5 ms begins at 1: a quarter has left at 2.25, half at 3.5. Then forward waits to its end at 6: backward needs what is left.
    table = timetable(layers, 1000, Rates(200.0, 1e9))
    assert table is not None and table.left_at_end == (0,) and table.loads == (1000, 1000, 1000)
    assert table.added_ms == pytest.approx(6 - 3, abs=1e-3)
    # With more room it need not end, and is not waited for.
    table = timetable(layers, 1500, Rates(200.0, 1e9))
    assert table is not None and table.left_at_end == () and table.added_ms == pytest.approx(0)


def test_what_stays_of_a_layer_leaves_little_room_unused() -> None:
    assert sorted(fitting([4, 30, 7, 30], 40)) == [1, 2]
    assert fitting([4, 30], 3) == [] and sorted(fitting([4, 30], 99)) == [0, 1]
    pieces = (64, 64, 16, 224, 224)
    costs = [LayerCost(str(place), sum(pieces), 1.0, 64, pieces) for place in range(8)]
    plan = choose(costs, 3 * sum(pieces) + 300, Rates(1e9, 1e9))
    assert plan.layers[4].stays_nbytes == 224 + 64 and plan.peak_nbytes <= 3 * sum(pieces) + 300


def test_ranks_agree_on_the_dearest_of_what_they_have_measured() -> None:
    one = Measured(
        (LayerCost("0", 100, 1.0, 10, (40, 60)), LayerCost("1", 50, 3.0, 20, (50,))), Rates(5.0, 9.0), 700
    )
    other = Measured(
        (LayerCost("0", 90, 2.0, 30, (90,)), LayerCost("1", 60, 1.0, 20, (60,))), Rates(6.0, 8.0), 800
    )
    costs = (LayerCost("0", 100, 2.0, 30, (40, 60)), LayerCost("1", 60, 3.0, 20, (60,)))
    assert agree([one, other]) == agree([other, one]) == Measured(costs, Rates(5.0, 8.0), 700)
    assert agree([one]) == one
    with pytest.raises(ValueError, match=r"have \[2, 1\] layers: give process_group"):
        agree([one, Measured(costs[:1], Rates(1.0, 1.0), 1)])


def test_a_plan_prints_as_a_table() -> None:
    lines = str(plan_of(3000, 1000 / 3)).splitlines()
    assert len(lines) == 8 and lines[0].split()[:2] == ["layer", "choice"]
    assert lines[-1].endswith("predicted to add 2.000 ms to a step")


layer_costs = st.lists(
    st.builds(
        lambda number, nbytes, forward_ms, part: LayerCost(
            str(number), nbytes, forward_ms, int(part * nbytes)
        ),
        st.integers(0, 9),
        st.integers(0, 2000),
        st.floats(0.01, 5.0),
        st.floats(0.0, 0.3),
    ),
    min_size=1,
    max_size=9,
)
rates = st.builds(Rates, st.floats(20.0, 1e5), st.floats(20.0, 1e5))


@settings(max_examples=150, deadline=None)
@given(layer_costs, rates, st.floats(0.0, 1.2), st.floats(0.0, 0.5))
def test_a_budget_is_kept_and_more_of_it_never_slows_a_step(
    costs: list[LayerCost], rates: Rates, part: float, more: float
) -> None:
    gradients = [*(cost.inputs_nbytes for cost in costs[1:]), 0]
    least = max(cost.nbytes + gradient for cost, gradient in zip(costs, gradients, strict=True))
    whole = sum(cost.nbytes for cost in costs)
    budget = max(least, int(part * whole), 1)
    plan, richer = (choose(costs, each, rates) for each in (budget, budget + int(more * whole)))
    for each in (plan, richer):
        assert each.peak_nbytes <= each.device_budget_bytes
        assert each.peak_nbytes >= costs[-1].nbytes and each.added_ms >= -1e-6
        assert all(0 <= layer.stays_nbytes <= layer.cost.nbytes for layer in each.layers)
    assert richer.added_ms <= plan.added_ms + 1e-5
    again = sum(cost.forward_ms for cost in costs[:-1])
    copied = sum(cost.nbytes * (1 / rates.to_host + 1 / rates.to_device) for cost in costs[:-1])
    assert plan.added_ms <= copied + 1e-5  # as if all copies were waited for
    inputs = sum(cost.inputs_nbytes * (1 / rates.to_host + 1 / rates.to_device) for cost in costs[:-1])
    assert plan.added_ms <= again + inputs + 1e-5
    if budget >= whole + max(gradients):
        assert plan.added_ms == pytest.approx(0, abs=1e-6)
        assert {layer.choice for layer in plan.layers} == {"keep"}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=6).map(tuple), min_size=1, max_size=8),
    rates,
    st.floats(0.0, 1.0),
)
def test_memories_that_move_as_a_whole_keep_a_budget_too(
    pieces: list[tuple[int, ...]], rates: Rates, part: float
) -> None:
    costs = [LayerCost("layer", sum(each), 1.0, each[0], each) for each in pieces]
    least = max(
        cost.nbytes + other.inputs_nbytes for cost, other in zip(costs, [*costs[1:], costs[0]], strict=True)
    )
    budget = max(least, int(part * sum(cost.nbytes for cost in costs)))
    plan = choose(costs, budget, rates)
    assert plan.peak_nbytes <= budget
    for layer in plan.layers:
        assert layer.stays_nbytes == layer.cost.fitting(layer.stays_nbytes)
