"""Second derivatives of every operation of NNOps, against differences of the first ones; or they are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

STEP = 1e-6
CLOSE = 1e-7
"""Rounding of 1e-16 over a step of 1e-6, and third derivatives near 10 times its square, each in sums of some ten."""
Call = Callable[..., Any]


def _linear(p: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    return p.linear(x, weight, bias)


# Attention is left out: torch's fused kernels have no second derivative, and say so.
CASES: dict[str, tuple[Call, Sequence[tuple[int, ...]]]] = {
    "linear": (_linear, [(3, 4), (5, 4)]),
    "linear of batches": (_linear, [(2, 3, 4), (5, 4), (5,)]),
    "linear of a vector": (_linear, [(4,), (5, 4), (5,)]),
    "matmul": (lambda p, x, y: p.matmul(x, y), [(3, 4), (4, 5)]),
    "matmul of batches": (lambda p, x, y: p.matmul(x, y), [(2, 1, 3, 4), (3, 4, 5)]),
    "matmul of a vector": (lambda p, x, y: p.matmul(x, y), [(4,), (2, 4, 5)]),
    "matmul with itself": (lambda p, x: p.matmul(x, p.transpose(x, 0, 1)), [(3, 4)]),
    "embedding": (
        lambda p, w: p.embedding(p.tensor([[2, 0, 2], [1, 3, 2]], "int64", p.device_of(w)), w),
        [(4, 3)],
    ),
    "softmax": (lambda p, x: p.softmax(x, 0), [(3, 4)]),
    "silu": (lambda p, x: p.silu(x), [(3, 4)]),
    "relu": (lambda p, x: p.relu(x) * x, [(3, 4)]),
    "gelu": (lambda p, x: p.gelu(x), [(3, 4)]),
    "rsqrt": (lambda p, x: p.rsqrt(x * x + 1), [(3, 4)]),
    "sqrt": (lambda p, x: p.sqrt(x * x + 1), [(3, 4)]),
    "exp": (lambda p, x: p.exp(x), [(3, 4)]),
    "log": (lambda p, x: p.log(x * x + 1), [(3, 4)]),
    "cos": (lambda p, x: p.cos(x), [(3, 4)]),
    "sin": (lambda p, x: p.sin(x), [(3, 4)]),
    "sum": (lambda p, x: p.sum(x * x * x, 1), [(3, 4)]),
    "mean": (lambda p, x: p.mean(x * x * x, (0, 1), True), [(3, 4)]),
    "cross_entropy": (
        lambda p, x: p.cross_entropy(x, p.tensor([1, 0, 3], "int64", p.device_of(x))),
        [(3, 4)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives_are_those_of_differences(platform, make, lacks, name):
    """Of ``sum(v * dL/dx)`` with ``L = sum(w * f(x))``, by every x and by w, through which the gradient comes."""
    function, shapes = CASES[name]
    random = np.random.default_rng(3)
    arrays = [random.uniform(-1, 1, shape) for shape in shapes]

    def leaf(values: Any) -> Any:
        return platform.set_requires_grad_(make(values, "float64"), True)

    if lacks("double_backward"):
        x = leaf([1.0])
        with pytest.raises(NotImplementedError, match=r"grad\(create_graph=True\)"):
            platform.grad([platform.sum(x * x)], [x], create_graph=True)
        return
    if lacks("float64_compute"):
        return
    outcome = tuple(function(platform, *[make(values, "float64") for values in arrays]).shape)
    directions = [random.uniform(-1, 1, shape) for shape in shapes]
    given = [*arrays, random.uniform(-1, 1, outcome)]

    def slope(values: Sequence[Any], create_graph: bool = False) -> tuple[list[Any], Any]:
        *xs, w = (leaf(each) for each in values)
        loss = platform.sum(function(platform, *xs) * w)
        total = None
        for gradient, direction in zip(
            platform.grad([loss], xs, create_graph=create_graph), directions, strict=True
        ):
            part = platform.sum(gradient * make(direction, "float64"))
            total = part if total is None else total + part
        return [*xs, w], total

    def number(values: Sequence[Any]) -> float:
        return float(platform.to_numpy(platform.detach(slope(values)[1])))

    leaves, total = slope(given, create_graph=True)
    found = platform.grad([total], leaves, allow_unused=True)
    for place, values in enumerate(given):
        expected = np.zeros(values.shape)
        for index in np.ndindex(values.shape):
            moved = []
            for step in (STEP, -STEP):
                changed = [each.copy() for each in given]
                changed[place][index] = changed[place][index] + step
                moved.append(number(changed))
            expected[index] = (moved[0] - moved[1]) / (2 * STEP)
        actual = np.zeros(values.shape) if found[place] is None else platform.to_numpy(found[place])
        np.testing.assert_allclose(actual, expected, rtol=0, atol=CLOSE, err_msg=f"by operand {place}")
