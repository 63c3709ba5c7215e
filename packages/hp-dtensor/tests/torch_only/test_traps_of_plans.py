"""Traps of dispatch that concern rules and plans, T4 and T5: see test_traps."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import (
    distribute_tensor,
)
from hp_dtensor.spec import MOST_PLANS, remember
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from placed_tensors import S0, TOLERANCE, TORCH, cut, make_mesh, whole_of

# -------------------------------------------------------------------------------------------------------------------- T4
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b, "@": lambda a, b: a @ b,
    "//": lambda a, b: a // b, "%": lambda a, b: a % b, "**": lambda a, b: a**b, "<": lambda a, b: a < b, ">=": lambda a, b: a >= b,
}  # fmt: skip


@distributed(2, backends=TORCH)
def test_t4_an_error_of_a_rule_is_not_made_an_unsupported_operand(world: World) -> None:
    a, b = cut(world, 5, 4), cut(world, 5, 3)
    for name, operator in OPERATORS.items():
        for first, second in ((a, b), (a, whole_of(world, 5, 3)), (whole_of(world, 5, 4), b)):
            with pytest.raises(ValueError, match=r"(?s)\(5, 4\).*\(5, 3\)"):
                operator(first, second)
        with pytest.raises(ValueError, match="requires grad, beside a DTensor"):
            operator(a, whole_of(world, 4, 4).requires_grad_())
        assert name


# -------------------------------------------------------------------------------------------------------------------- T5
@distributed(2, backends=TORCH)
def test_t5_equal_numbers_of_other_types_have_plans_of_their_own(world: World) -> None:
    whole = torch.tensor([0, 1, 2], device=world.device)
    for operator in OPERATORS.values():
        for flag in (False, True):
            x = whole > 0 if flag else whole
            for first, second in ((1, 1.0), (1.0, True), (True, 1)):
                for number in (first, second, first):
                    try:
                        expected = operator(x, number)
                    except (RuntimeError, TypeError):
                        continue  # no such operation of bools
                    found = operator(distribute_tensor(x, make_mesh(world), [S0]), number)
                    assert found.dtype == expected.dtype
                    assert_parity(found, expected, exact=True)


@distributed(2, backends=TORCH)
def test_t5_numbers_that_change_with_every_step_make_no_new_plans(world: World) -> None:
    x, y, whole = cut(world, 4, 6), cut(world, 4, 6), whole_of(world, 4, 6)
    uses: dict[str, Callable[[Any, Any, float], Any]] = {
        "mul": lambda x, y, v: x * v,
        "rsub": lambda x, y, v: v - x,
        "pow": lambda x, y, v: x.abs() ** v,
        "add": lambda x, y, v: torch.add(x, y, alpha=v),
        "addcmul": lambda x, y, v: torch.addcmul(x, x, y, value=v),
        "lerp": lambda x, y, v: torch.lerp(x, y, v),
        "clamp": lambda x, y, v: x.clamp(-v, max=v),
        "leaky_relu": lambda x, y, v: F.leaky_relu(x, v),
        "masked_fill": lambda x, y, v: x.masked_fill(y > 0, v),
        "where": lambda x, y, v: torch.where(y > 0, x, v),
        "fill_": lambda x, y, v: x.clone().fill_(v),
        "full_like": lambda x, y, v: torch.full_like(x, v),
        "foreach": lambda x, y, v: torch._foreach_mul([x, y], [v, 2 * v])[1],
        "comparison": lambda x, y, v: x > v,
        "a tensor as a number": lambda x, y, v: torch.add(x, y, alpha=torch.tensor(v, dtype=torch.float64)),
    }
    plans = x._spec.plans
    for name, use in uses.items():
        known = []
        for step in range(1, 4):
            found, expected = use(x, y, step / 7), use(whole, whole, step / 7)
            assert_parity(found, expected, rtol=TOLERANCE, name=name)
            known.append(len(plans))
        assert known[0] == known[2], name


@pytest.mark.once
def test_t5_what_values_do_make_new_plans_for_is_bounded() -> None:
    plans: dict[int, int] = {}
    for i in range(3 * MOST_PLANS):
        remember(plans, i, i)
        assert len(plans) <= MOST_PLANS and plans[i] == i
    assert list(plans) == sorted(plans)  # the oldest go first
