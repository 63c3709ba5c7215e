"""The rule checker itself: what counts as the same program, what it refuses to skip, and which combinations a run tries."""

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor.placements import Partial, Replicate, Shard
from hp_dtensor.rule_checker import RefusedError, RuleChecker
from hp_dtensor.rules.registry import RULES, Outcome, rule
from hp_dtensor.same_program import program
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from covering import Covering, sample
from rule_cases import filled, t

S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()


def _adder(n: Any) -> Any:
    return lambda x: x + n


def _countdown(n: int) -> Any:
    def down(i: int) -> int:
        return n if i == 0 else down(i - 1)

    return down


@pytest.mark.once
def test_functions_with_equal_closures_are_the_same_program() -> None:
    for one, other in [
        (2, 2),
        (2.5, 2.5),
        ((1, (2,)), (1, (2,))),
        ([S0], [S0]),
        ({"a": 1}, {"a": 1}),
        (S0, Shard(0)),
    ]:
        assert program(_adder(one)) == program(_adder(other))
    assert program(_countdown(3)) == program(_countdown(3))


@pytest.mark.once
def test_functions_that_differ_anywhere_inside_are_different_programs() -> None:
    a, b = object(), object()
    for one, other in [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (S0, S1),
        ((1,), [1]),
        (a, b),
        (_adder(1), _adder(2)),
        (P, Partial("avg")),
    ]:
        assert program(_adder(one)) != program(_adder(other)), (one, other)
    assert program(_countdown(3)) != program(_countdown(4))
    assert program(_adder(1)) != program(lambda x: x + 1)


@distributed(world_size=1)
def test_a_program_runs_once_for_all_combinations_that_come_to_it(world: World) -> None:
    checker = RuleChecker("mul", lambda x, y: x * y, filled([t(5, 3), t(5, 3)]), (2,), tolerance=1e-10)
    for placements in itertools.product([S0, S1, R, Partial("max")], repeat=2):
        checker.check([(p,) for p in placements])
    # Whole, cut in rows, cut in columns: what is cut otherwise is moved.
    assert checker.programs <= 5
    before = checker.programs
    checker.check([(S0,), (S0,)])
    assert checker.programs == before


@distributed(world_size=1)
def test_a_lie_in_one_combination_is_caught_after_others_have_passed(world: World) -> None:
    checker = RuleChecker(
        "identity", lambda x: world.platform.relu(x), filled([t(5, 3)]), (2, 2), tolerance=1e-10
    )
    for placements in itertools.product([S0, S1, R], repeat=2):
        checker.check([placements])
    with pytest.raises(AssertionError, match="rule 'identity'.*Partial"):
        checker.check([(P, R)])
    with pytest.raises(AssertionError, match="rule 'identity'.*Partial"):
        checker.check([(P, R)])


@distributed(world_size=1)
def test_what_a_rule_refuses_is_told_apart_from_what_passes(world: World) -> None:
    @rule("refuses_columns")
    def plan(x: Any) -> Outcome:
        if x.placements == (S1,):
            raise ValueError("columns stay whole")
        return Outcome((None,), x.placements, x.shape)

    try:
        checker = RuleChecker("refuses_columns", lambda x: x + x, filled([t(5, 3)]), (2,), tolerance=1e-10)
        checker.check([(S0,)])
        with pytest.raises(RefusedError, match=r"Shard\(1\)") as refused:
            checker.check([(S1,)])
        assert str(refused.value.__cause__) == "columns stay whole"
        assert checker.programs == 1
    finally:
        del RULES["refuses_columns"]


@pytest.mark.once
@pytest.mark.parametrize("lengths", [(3, 4, 2), (3, 2, 4, 3), (5, 5, 5, 5), (2, 3, 2, 3, 2)])
def test_every_three_lists_meet_in_every_combination(lengths: tuple[int, ...]) -> None:
    covering = Covering(lengths)
    tried = [covering[n] for n in range(len(covering))]
    assert all(0 <= i < n for member in tried for i, n in zip(member, lengths, strict=True))
    for places in itertools.combinations(range(len(lengths)), 3):
        met = {tuple(member[i] for i in places) for member in tried}
        assert met == set(itertools.product(*[range(lengths[i]) for i in places]))


@pytest.mark.once
def test_up_to_three_lists_give_their_product_and_more_give_less() -> None:
    assert len(Covering((36, 36, 49))) == 36 * 36 * 49
    assert len({Covering((3, 4))[n] for n in range(12)}) == 12
    assert len(Covering((64, 64, 64, 64))) == 67**3


@pytest.mark.once
def test_a_sample_has_different_members_and_is_the_same_each_time() -> None:
    assert sample((4, 5), 6) == sample((4, 5), 6)
    assert len(set(sample((4, 5), 6))) == 6
    assert len(sample((4, 5), 100)) == 20
