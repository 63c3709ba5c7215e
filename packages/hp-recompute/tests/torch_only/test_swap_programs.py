"""Random programs of views, writes in place and shared memory: swapped as plain autograd has them; and compiled functions."""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hp_recompute import CheckpointPolicy, checkpoint, swap
from hp_recompute.swapping.late_copies import LateCopies, late_copies
from hp_recompute.swapping.manager import SwapManager, use_manager

ROWS, COLUMNS = 4, 6

SIMPLE = {
    "sin": torch.sin,
    "exp": lambda x: torch.exp(x * 0.1),
    "relu": torch.relu,
    "double": lambda x: x * 2,
    "square": lambda x: x * x * 0.1,
    "half": lambda x: x.float().double(),
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: torch.softmax(x, -1),
    "clone": torch.clone,
}
VIEWS = {
    "transpose": lambda x: x.transpose(0, 1),
    "rows": lambda x: x[1:],
    "columns": lambda x: x[:, ::2],
    "flat": lambda x: x.reshape(-1)[3:].view(-1, 1),
    "row": lambda x: x[:1].expand(3, x.shape[1]),
    "itself": lambda x: x.view_as(x),
}
WRITES = {
    "add_": lambda x: x.add_(1.0),
    "mul_": lambda x: x.mul_(0.5),
    "sin_": lambda x: x.sin_(),
    "part": lambda x: x[:1].mul_(2.0),  # of what may have no rows
    "relu_": lambda x: x.relu_(),
}
PAIRS = {
    "add": lambda x, y: x + y.sum(),
    "mul": lambda x, y: x * y.mean(),
    "outer": lambda x, y: x.reshape(-1, 1)[:5] @ y.reshape(1, -1)[:, :5],
}

steps = st.lists(
    st.tuples(
        st.sampled_from([*SIMPLE, *VIEWS, *WRITES, *PAIRS]),
        st.integers(0, 7),
        st.integers(0, 7),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)
"""Operation, the values that it takes (counted from the newest), and whether its result is dropped from what later calls hold."""


def run(program: list[list[tuple[str, int, int, bool]]], call: Any, order: list[int]) -> list[Any]:
    """Gradients of micro-batches, or the class of the first error."""
    weight = torch.linspace(-1, 1, ROWS * COLUMNS, dtype=torch.float64).view(ROWS, COLUMNS).requires_grad_()
    found: list[Any] = []
    losses = []
    inputs = [torch.full((ROWS, COLUMNS), 0.1 * (k + 1), dtype=torch.float64).requires_grad_() for k in order]
    for x in inputs:
        values = [x * 1.5, weight * 1]
        for part in program:
            values = call(one_call, part, values)
        losses.append(sum((value * value).sum() for value in values))
    for index in order:
        try:
            losses[index].backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error), error
            found.append("written")
    return [*found, *(x.grad for x in (*inputs, weight))]


def one_call(part: list[tuple[str, int, int, bool]], values: list[Any]) -> list[Any]:
    values = list(values)
    for name, first, second, drops in part:
        x, y = values[-1 - first % len(values)], values[-1 - second % len(values)]
        if name in WRITES:
            if x._base is not None and 0 in x.stride():  # expanded: torch refuses to write
                continue
            WRITES[name](x)
        elif name in PAIRS:
            values.append(PAIRS[name](x, y))
        elif x.dim() == 2 and x.numel() > 6:
            values.append({**SIMPLE, **VIEWS}[name](x))
        if drops and len(values) > 2:
            values.pop(0)
    return values[-4:]


def assert_same(one: torch.Tensor | None, other: torch.Tensor | None) -> None:
    """The same bits; what is no number is the same in both, since a program may well overflow."""
    if one is None or other is None:
        assert one is other
        return
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=150, deadline=None)
@given(
    program=st.lists(steps, min_size=1, max_size=4),
    order=st.permutations(range(2)),
    group_swap=st.booleans(),
    nests=st.booleans(),
)
def test_random_programs_give_the_gradients_and_errors_of_plain_autograd(
    program: Any, order: list[int], group_swap: bool, nests: bool
) -> None:
    expected = run(program, lambda function, *args: function(*args), order)

    def swapped(function: Any, *args: Any) -> Any:
        if nests:
            return swap(lambda *args: swap(function, *args, group_swap=group_swap), *args)
        return swap(function, *args, group_swap=group_swap)

    with late_copies():
        found = run(program, swapped, order)
    if "written" in expected:
        # A backward that fails leaves gradients of which nothing is promised; those behind it fail alike.
        assert found.count("written") == expected.count("written")
        return
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(
    ("function", "operation"), [(torch.sin, "SinBackward0"), (torch.square, "PowBackward0")]
)
def test_a_written_tensor_is_told_with_the_operation_that_needs_it(function: Any, operation: str) -> None:
    x = torch.ones(3, requires_grad=True)
    kept = x * 2
    with late_copies():
        y = swap(lambda x: function(x) * 3, kept).sum()
        with torch.no_grad():
            kept.add_(1.0)
        with pytest.raises(
            RuntimeError, match=rf"float32 of shape \(3,\), which {operation} needs, has been modified"
        ):
            y.backward()


class AnyRoom(LateCopies):
    """The device has as much memory in use as it likes to say: copies are early, late, or in between."""

    said: ClassVar[deque[int]] = deque([0])

    def in_use(self) -> int:
        self.said.rotate(-1)
        return self.said[0]


OVERFLOWING = [
    [("exp", 0, 0, False), ("double", 0, 0, False), ("add", 0, 0, False)],
    [
        ("exp", 0, 0, False),
        ("sin", 0, 0, False),
        ("add", 0, 1, False),
        ("sin", 0, 0, False),
        ("exp", 1, 0, False),
    ],
]
"""Its gradients are no numbers."""


@settings(max_examples=40, deadline=None)
@example(program=OVERFLOWING, orders=[[0, 1]], said=[0], kept=[False], group_swap=False)
@given(
    program=st.lists(steps, min_size=2, max_size=5),
    orders=st.lists(st.permutations(range(2)), min_size=1, max_size=2),
    said=st.lists(st.integers(0, 4000), min_size=1, max_size=20),
    kept=st.lists(st.booleans(), min_size=1, max_size=5),
    group_swap=st.booleans(),
)
def test_whatever_room_there_is_every_step_of_a_random_program_gives_the_plain_numbers(
    program: Any, orders: list[list[int]], said: list[int], kept: list[bool], group_swap: bool
) -> None:
    expected = {
        tuple(order): run(program, lambda function, *args: function(*args), order) for order in orders
    }
    counter = count()

    def swapped(function: Any, *args: Any) -> Any:
        if kept[next(counter) % len(kept)]:
            return swap(function, *args, policy_fn=lambda _: CheckpointPolicy.MUST_SAVE)
        return swap(function, *args, group_swap=group_swap)

    AnyRoom.said = deque(said)
    with use_manager(SwapManager(copies=AnyRoom)):
        for order in [*orders, *orders, *orders]:
            found, plain = run(program, swapped, order), expected[tuple(order)]
            if "written" in plain:
                assert found.count("written") == plain.count("written")
                continue
            for one, other in zip(found, plain, strict=True):
                assert_same(one, other)


# Dynamo itself looks for the gradients of what is no leaf where its graph goes on behind a call that it does not record.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.parametrize("where", ["inside", "around", "in a checkpoint"])
def test_compiled_functions_may_be_swapped_and_swapped_ones_compiled(where: str) -> None:
    weight = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4).requires_grad_()

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ weight) * x

    compiled = torch.compile(layer, backend="aot_eager")
    calls = {
        "inside": lambda x: swap(compiled, swap(compiled, x)),
        "around": torch.compile(lambda x: swap(layer, swap(layer, x)), backend="aot_eager"),
        "in a checkpoint": lambda x: swap(lambda x: checkpoint(compiled, x), swap(compiled, x)),
    }

    def gradients(call: Any) -> list[Any]:
        x = torch.full((3, 4), 0.5, dtype=torch.float64, requires_grad=True)
        weight.grad = None
        call(x).sum().backward()
        return [x.grad, weight.grad]

    expected = gradients(lambda x: layer(layer(x)))
    with late_copies() as manager:
        for _ in range(2):
            for one, other in zip(gradients(calls[where]), expected, strict=True):
                assert torch.equal(one, other)
        assert manager.host_nbytes > 0
