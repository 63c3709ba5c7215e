"""Cases for the rule checker, and how many combinations of placements of each a run tries.

A test module fills a table with :func:`case` and calls :func:`check` for each entry. By default a sample of the combinations
runs, the same in every run; with HP_FULL_RULES=1 in the environment (``nox -s full-hp-dtensor`` sets it) all of them do, or
LIMIT of them where three tensors and more make tens of thousands.
"""

import itertools
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_dtensor.placements import Partial, Placement, Replicate, Shard
from hp_dtensor.rule_checker import check_rule
from hp_platform import get_platform

IS_FULL = os.environ.get("HP_FULL_RULES", "0") not in ("", "0")
MESHES: list[tuple[int, ...]] = [(2,), (4,), (2, 2)] if IS_FULL else [(2,), (3,), (2, 2)]
SIZES = (1, 2, 3, 5, 8)
"""That shapes of cases are made of: smaller, equal and larger than meshes, and prime."""
SAMPLES = 3
"""Combinations per case and mesh in the default run."""
LIMIT = 2000
"""The same in the full run."""
# A few hundred roundings of numbers below 1e3 in float64.
TOLERANCE = 1e-10


@dataclass(frozen=True)
class T:
    """Stands for a tensor: floats within bounds (all different up to 31), whole numbers below a bound, or truth values."""

    shape: tuple[int, ...]
    dtype: str = "float64"
    low: float = -3.75
    high: float = 3.75


def t(*shape: int, low: float = -3.75, high: float = 3.75) -> T:
    """A tensor of floats."""
    return T(shape, "float64", low, high)


def whole_numbers(*shape: int, below: int) -> T:
    """A tensor of whole numbers from 0 on."""
    return T(shape, "int64", 0, below)


def truths(*shape: int) -> T:
    """A tensor of truth values."""
    return T(shape, "bool")


@dataclass(frozen=True)
class Case:
    """One call of an operation."""

    rule: str
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)


Cases = dict[str, Case]


def case(cases: Cases, rule: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Enter ``function(*args, **kwargs)`` in a table; an argument ``T`` becomes a tensor, also in lists."""
    words = " ".join(_shown(arg) for arg in args)
    named = " ".join(f"{name}={value}" for name, value in kwargs.items())
    label = f"{rule}: {getattr(function, '__name__', '')} {words} {named}".rstrip()
    while label in cases:
        label = label + "'"
    cases[label] = Case(rule, function, args, kwargs)


def check(given: Case, samples: int = SAMPLES, tolerance: float = TOLERANCE) -> None:
    """Run a case through the rule checker, in all combinations of placements on all meshes or a sample of them."""
    tensors = list(_tensors(given.args))
    made = iter([numbers(x, i) for i, x in enumerate(tensors)])
    args = [_filled(arg, made) for arg in given.args]
    for mesh in MESHES:
        for placements in combinations(tensors, mesh, samples):
            check_rule(
                given.rule,
                given.function,
                args,
                placements,
                mesh,
                kwargs=given.kwargs,
                tolerance=tolerance,
            )


def combinations(
    tensors: Sequence[T], mesh: tuple[int, ...], samples: int = SAMPLES
) -> Iterator[list[tuple[Placement, ...]]]:
    """Placements for each tensor: all combinations, or a sample of them that is the same in every run."""
    per_tensor = [list(itertools.product(choices(x), repeat=len(mesh))) for x in tensors]
    count = math.prod(map(len, per_tensor))
    drawn: Sequence[int] = range(count)
    limit = LIMIT if IS_FULL else samples
    if count > limit:
        drawn = random.Random(count).sample(drawn, limit)
    for number in drawn:
        combination = []
        for own in per_tensor:
            number, place = divmod(number, len(own))
            combination.append(own[place])
        yield combination


def choices(x: T) -> list[Placement]:
    """The placements that a tensor is tried in, along one mesh dim."""
    kinds = {"float64": ("sum", "avg", "max"), "int64": ("max",), "bool": ("any",)}[x.dtype]
    return [*map(Shard, range(len(x.shape))), Replicate(), *map(Partial, kinds)]


def numbers(x: T, start: int = 0) -> Any:
    """The tensor that ``x`` stands for, on the default device."""
    platform = get_platform()
    steps = [(i * 7 + start * 3 + 1) % 31 for i in range(math.prod(x.shape))]
    if x.dtype == "float64":
        values: list[Any] = [x.low + (x.high - x.low) * (step + 0.5) / 31 for step in steps]
    elif x.dtype == "int64":
        values = [step % int(x.high) for step in steps]
    else:
        values = [step % 3 == 0 for step in steps]
    return platform.reshape(platform.tensor(values, x.dtype), x.shape)


def _tensors(args: Sequence[Any]) -> Iterator[T]:
    for arg in args:
        if isinstance(arg, T):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _tensors(arg)


def _filled(arg: Any, made: Iterator[Any]) -> Any:
    if isinstance(arg, (list, tuple)):
        return type(arg)(_filled(x, made) for x in arg)
    return next(made) if isinstance(arg, T) else arg


def _shown(arg: Any) -> str:
    if isinstance(arg, T):
        return "x".join(map(str, arg.shape)) or "scalar"
    return f"({' '.join(map(_shown, arg))})" if isinstance(arg, (list, tuple)) else str(arg)
