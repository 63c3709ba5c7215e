"""Every rule in every combination of placements, against the unsharded operation; values and gradients, in float64."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor.placements import Partial, Shard
from hp_dtensor.rule_checker import check_rule
from hp_platform import get_platform
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from resized import add_resized
from rule_cases import Case, Part, T, check, filled, parts

# Products of at most 8 terms of numbers below 4, summed over at most 4 ranks: 1e-11 is 1e3 times their rounding.
TOLERANCE = 1e-11

# Name -> (rule, shapes of the tensors, the call).
CASES: dict[str, tuple[str, list[tuple[int, ...]], Callable[..., Any]]] = {
    "relu": ("pointwise", [(5, 3)], lambda p: p.relu),
    "square": ("pointwise", [(2, 1, 3)], lambda p: lambda x: x * x),
    "two nonlinear": ("pointwise", [(5, 3), (5, 3)], lambda p: lambda x, y: x * y + x * x),
    "where": ("where", [(5, 1), (5, 3), (3,)], lambda p: lambda c, x, y: p.where(c > 0, x, y)),
    "neg": ("negated", [(5, 3)], lambda p: lambda x: -x),
    "clone": ("copied", [(8,)], lambda p: p.clone),
    "add": ("add", [(5, 3), (5, 3)], lambda p: lambda x, y: x + y),
    "add broadcast": ("add", [(2, 5, 3), (5, 1)], lambda p: lambda x, y: x + y),
    "sub": ("add", [(8, 2), (2,)], lambda p: lambda x, y: x - y),
    "mul": ("mul", [(5, 3), (5, 3)], lambda p: lambda x, y: x * y),
    "mul broadcast": ("mul", [(1, 3), (5, 3)], lambda p: lambda x, y: x * y),
    "div": ("div", [(5, 3), (5, 3)], lambda p: lambda x, y: x / y),
    "reversed div": ("reversed_div", [(5, 3), (3,)], lambda p: lambda x, y: y / x),
    "matrix": ("matmul", [(5, 3), (3, 8)], lambda p: p.matmul),
    "vector matrix": ("matmul", [(3,), (3, 5)], lambda p: p.matmul),
    "matrix vector": ("matmul", [(5, 3), (3,)], lambda p: p.matmul),
    "batches": ("matmul", [(2, 5, 3), (2, 3, 1)], lambda p: p.matmul),
    "batch and matrix": ("matmul", [(3, 2, 5), (5, 2)], lambda p: p.matmul),
    "batches broadcast": ("matmul", [(1, 2, 2, 3), (3, 1, 3, 2)], lambda p: p.matmul),
    "reversed matmul": ("reversed_matmul", [(3, 8), (5, 3)], lambda p: lambda b, a: p.matmul(a, b)),
    "linear": ("linear", [(2, 5, 3), (8, 3)], lambda p: p.linear),
    "linear with bias": ("linear", [(5, 3), (2, 3), (2,)], lambda p: p.linear),
}

# The same with one tensor and arguments that count.
VIEWS: dict[str, tuple[str, tuple[int, ...], tuple[Any, ...], Callable[..., Any]]] = {}


def _view(rule: str, shape: tuple[int, ...], args: tuple[Any, ...], call: Callable[..., Any]) -> None:
    VIEWS[f"{rule} {shape} {args}"] = (rule, shape, args, call)


for source, target in [
    ((4, 6), (24,)),
    ((5, 3), (15,)),
    ((24,), (4, 6)),
    ((12, 8), (-1, 6)),
    ((8, 3), (2, 4, 3)),
    ((2, 5, 3), (10, 3)),
    ((2, 5, 3), (2, 15)),
    ((1, 8), (8, 1)),
    ((5, 1, 3), (1, 5, 3)),
    ((2, 3, 2), (2, 6)),
    ((0, 3), (3, 0)),
    ((0, 5, 3), (0, 3)),
    ((2, 0, 4, 3), (2, 0, 2, 2, 3)),
    ((1,), ()),
]:
    _view("view", source, (target,), lambda p, target=target: lambda x, shape: p.reshape(x, shape))
for dims in [(0, -1), (1, 2), (-3, -2)]:
    _view("flatten", (2, 5, 3), dims, lambda p: lambda x, a, b: p.reshape(x, _flat(tuple(x.shape), a, b)))
_view("unflatten", (8, 3), (0, (2, -1)), lambda p: lambda x, dim, sizes: p.reshape(x, (2, 4, 3)))
_view("unflatten", (3, 8), (-1, (8, 1)), lambda p: lambda x, dim, sizes: p.reshape(x, (3, 8, 1)))
_view("unflatten", (1, 5, 2), (1, (1, 5)), lambda p: lambda x, dim, sizes: p.reshape(x, (1, 1, 5, 2)))
_view("squeeze", (1, 5, 1), (), lambda p: lambda x: p.reshape(x, (5,)))
_view("squeeze", (2, 1, 3), (1,), lambda p: lambda x, dim: p.reshape(x, (2, 3)))
_view("squeeze", (2, 3), (0,), lambda p: lambda x, dim: x + 0)
for dim in (0, 1, -1):
    _view(
        "unsqueeze",
        (5, 3),
        (dim,),
        lambda p: lambda x, at: p.reshape(x, [(1, 5, 3), (5, 1, 3), (5, 3, 1)][at]),
    )
_view("unsqueeze", (1, 8, 2), (1,), lambda p: lambda x, at: p.reshape(x, (1, 1, 8, 2)))
_view("transpose", (2, 5, 3), (0, -1), lambda p: p.transpose)
_view("permute", (5, 3), ((1, 0),), lambda p: lambda x, order: p.transpose(x, *order))
_view("t", (5, 3), (), lambda p: lambda x: p.transpose(x, 0, 1))
_view("expand", (5, 1), ((2, -1, 3),), lambda p: lambda x, shape: _stretch(p, x, shape))
_view("expand", (1, 3), ((8, 3),), lambda p: lambda x, shape: _stretch(p, x, shape))
for dim in (None, 0, -1, (0, 2)):
    for keepdim in (False, True):
        for name in ("sum", "mean"):
            _view(name, (5, 3, 2), (dim, keepdim), lambda p, name=name: getattr(p, name))
_view("mean", (1, 2), (0, False), lambda p: p.mean)


def _flat(shape: tuple[int, ...], first: int, last: int) -> tuple[int, ...]:
    first, last = first % len(shape), last % len(shape)
    inner = 1
    for n in shape[first : last + 1]:
        inner = inner * n
    return (*shape[:first], inner, *shape[last + 1 :])


def _stretch(p: Any, x: Any, shape: tuple[int, ...]) -> Any:
    """expand, by broadcasting."""
    own = (1,) * (len(shape) - len(x.shape)) + tuple(x.shape)
    target = tuple(n if m == -1 else m for n, m in zip(own, shape, strict=True))
    return x + p.zeros(target, x.dtype)


def _t(shape: tuple[int, ...]) -> T:
    """Different numbers from -3.5 to 4, none of them 0."""
    return T(shape, low=-3.5, high=4.0)


# What takes the platform and gives the function stands in the function's place.
OPERATIONS = {name: Case(rule, call, list(map(_t, shapes))) for name, (rule, shapes, call) in CASES.items()}
CHANGES = {name: Case(rule, call, [_t(shape), *args]) for name, (rule, shape, args, call) in VIEWS.items()}


def _on(given: Case, world: World) -> Case:
    return replace(given, function=given.function(world.platform))


def _samples(world: World) -> int:
    """As many combinations as the default run has time for; elsewhere than on torch each takes up to ten times as long."""
    return 60 if world.backend in ("torch", "cuda") else 20


for _cases in (OPERATIONS, CHANGES):
    add_resized(_cases, lambda function: function(get_platform()))


@pytest.mark.parametrize("part", parts(OPERATIONS, __file__))
@distributed(world_size=1)
def test_operation_gives_values_and_gradients_of_the_unsharded_one(part: Part, world: World) -> None:
    check(_on(OPERATIONS[part.name], world), part, _samples(world), TOLERANCE)


@pytest.mark.parametrize("part", parts(CHANGES, __file__))
@distributed(world_size=1)
def test_change_of_shape_gives_values_and_gradients_of_the_unsharded_one(part: Part, world: World) -> None:
    check(_on(CHANGES[part.name], world), part, _samples(world), TOLERANCE)


# A wrong rule must be caught: the operation, what it is taken for, where that shows.
LIES = {
    "abs carries no sum": ("identity", [(5, 3)], [Partial()], lambda p: lambda x: p.relu(x) + p.relu(-x)),
    "a product of two sums": ("add", [(3,), (3,)], [Partial(), Partial()], lambda p: lambda x, y: x * y),
    "a sum over a cut dim": ("identity", [(5,)], [Shard(0)], lambda p: lambda x: p.sum(x) + x),
    "a mean without weights": ("sum", [(5,)], [Shard(0)], lambda p: lambda x: p.mean(x)),
    "rows that trade places": ("identity", [(4, 4)], [Shard(0)], lambda p: lambda x: p.transpose(x, 0, 1)),
}


@pytest.mark.parametrize("lie", LIES)
@distributed(world_size=1)
def test_checker_catches(lie: str, world: World) -> None:
    rule, shapes, placements, call = LIES[lie]
    args = filled([_t(shape) for shape in shapes])
    with pytest.raises(AssertionError, match=rf"rule '{rule}'"):
        check_rule(rule, call(world.platform), args, [(p,) for p in placements], (2,), tolerance=TOLERANCE)
