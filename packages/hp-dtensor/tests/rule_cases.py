"""Cases for the rule checker, and how many combinations of placements of each a run tries.

A test module fills a table with :func:`case`, makes a test of each of its :func:`parts` and calls :func:`check` in it. By
default a sample of the combinations runs, the same in every run. With HP_FULL_RULES=1 in the environment
(``nox -s full-hp-dtensor`` sets it) they run as [Note: every three meet] in ``covering.py`` says; large cases are dealt to
several tests. HP_RULE_LOG=FILE collects one line of JSON for each part that has passed, at once; a part that stands there
already is skipped by that name, so that a run that was cut off can go on.
"""

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from covering import Covering, sample

from hp_dtensor.placements import Partial, Placement, Replicate, Shard
from hp_dtensor.rule_checker import RefusedError, RuleChecker
from hp_platform import get_platform

IS_FULL = os.environ.get("HP_FULL_RULES", "0") not in ("", "0")
MESHES: list[tuple[int, ...]] = [(2,), (4,), (2, 2)] if IS_FULL else [(2,), (3,), (2, 2)]
SIZES = (1, 2, 3, 5, 8)
"""That shapes of cases are made of: smaller, equal and larger than meshes, and prime."""
SAMPLES = 3
"""Combinations per case and mesh in the default run."""
PART = 40_000
"""Combinations per test in the full run."""
LOG = os.environ.get("HP_RULE_LOG", "")
# A few hundred roundings of numbers below 1e3 in float64.
TOLERANCE = 1e-10


@dataclass(frozen=True)
class T:
    """Stands for a tensor: floats within bounds (all different up to 31), complex ones, whole numbers below a bound, or truths."""

    shape: tuple[int, ...]
    dtype: str = "float64"
    low: float = -3.75
    high: float = 3.75


def t(*shape: int, low: float = -3.75, high: float = 3.75) -> T:
    """A tensor of floats."""
    return T(shape, "float64", low, high)


def complexes(*shape: int) -> T:
    """A tensor of complex numbers."""
    return T(shape, "complex128")


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


@dataclass(frozen=True)
class Part:
    """What one test tries of a case: combinations of placements on one mesh, by their numbers."""

    file: str
    """The test module's."""
    name: str
    """Of the case."""
    meshes: tuple[tuple[int, ...], ...]
    numbers: range | None = None
    """Of the combinations on the one mesh; None: a sample on each."""

    @property
    def id(self) -> str:
        """The last part of the test's id."""
        if self.numbers is None:
            return self.name
        return f"{self.name} on {'x'.join(map(str, self.meshes[0]))} from {self.numbers.start}"


def parts(cases: Cases, file: str) -> list[Any]:
    """Parameters for pytest: all parts of these cases in the tests of ``file``."""
    file, passed = Path(file).name, _passed()
    found = []
    for name, given in cases.items():
        for part in _parts(given, name, file):
            has_passed = (file, part.id) in passed
            marks = [pytest.mark.skip(reason=f"passed before, says {LOG}")] if has_passed else []
            found.append(pytest.param(part, id=part.id, marks=marks))
    return found


def _parts(given: Case, name: str, file: str) -> Iterator[Part]:
    if not IS_FULL:
        yield Part(file, name, tuple(MESHES))
        return
    tensors = list(tensors_of(given.args))
    for mesh in MESHES:
        count = len(Covering([len(choices(x)) ** len(mesh) for x in tensors]))
        for first in range(0, count, PART):
            yield Part(file, name, (mesh,), range(first, min(first + PART, count)))


def check(
    given: Case, part: Part | None = None, samples: int = SAMPLES, tolerance: float = TOLERANCE
) -> None:
    """Run a part of a case through the rule checker, or all of them one after another.

    Combinations that the rule refuses by a ValueError are counted; a rule that refuses all of them fails.
    """
    if part is None:
        for one in _parts(given, given.rule, ""):
            check(given, one, samples, tolerance)
        return
    tensors, args = list(tensors_of(given.args)), filled(given.args)
    for mesh in part.meshes:
        begin = time.perf_counter()
        checker = RuleChecker(
            given.rule, given.function, args, mesh, kwargs=given.kwargs, tolerance=tolerance
        )
        count, refusals = 0, 0
        reasons: dict[str, None] = {}
        for placements in combinations(tensors, mesh, part.numbers, samples):
            count = count + 1
            try:
                checker.check(placements)
            except RefusedError as error:
                refusals = refusals + 1
                reasons[str(error.__cause__)] = None
        assert refusals < count, f"{part.id} on {mesh}: every combination is refused: {list(reasons)[:3]}"
        if LOG and part.numbers is not None:
            told = {
                "file": part.file,
                "part": part.id,
                "rule": given.rule,
                "mesh": mesh,
                "tensors": len(tensors),
                "combinations": count,
                "programs": checker.programs,
                "refused": refusals,
                "reasons": list(reasons)[:2],
                "seconds": round(time.perf_counter() - begin, 2),
            }
            with Path(LOG).open("a", encoding="utf-8") as log:
                log.write(json.dumps(told) + "\n")


def _passed() -> set[tuple[str, str]]:
    """Parts that the log tells of, by file and id."""
    if not LOG or not Path(LOG).exists():
        return set()
    lines = [json.loads(line) for line in Path(LOG).read_text(encoding="utf-8").splitlines()]
    return {(line["file"], line["part"]) for line in lines}


def combinations(
    tensors: Sequence[T], mesh: tuple[int, ...], numbers: range | None, samples: int = SAMPLES
) -> Iterator[list[tuple[Placement, ...]]]:
    """Placements for each tensor: those of a part, by their numbers, or a sample."""
    per_tensor = [list(itertools.product(choices(x), repeat=len(mesh))) for x in tensors]
    lengths = [len(own) for own in per_tensor]
    covering = Covering(lengths)
    drawn = sample(lengths, samples) if numbers is None else (covering[number] for number in numbers)
    for places in drawn:
        yield [own[place] for own, place in zip(per_tensor, places, strict=True)]


def choices(x: T) -> list[Placement]:
    """The placements that a tensor is tried in, along one mesh dim."""
    kinds = {
        "float64": ("sum", "avg", "max"),
        "complex128": ("sum", "avg"),
        "int64": ("sum", "max"),
        "bool": ("any",),
    }[x.dtype]
    return [*map(Shard, range(len(x.shape))), Replicate(), *map(Partial, kinds)]


def numbers(x: T, start: int = 0) -> Any:
    """The tensor that ``x`` stands for, on the default device."""
    platform = get_platform()
    steps = [(i * 7 + start * 3 + 1) % 31 for i in range(math.prod(x.shape))]
    reals = [x.low + (x.high - x.low) * (step + 0.5) / 31 for step in steps]
    if x.dtype == "float64":
        values: list[Any] = reals
    elif x.dtype == "complex128":
        values = [complex(value, other) for value, other in zip(reals, reversed(reals), strict=True)]
    elif x.dtype == "int64":
        values = [step % int(x.high) for step in steps]
    else:
        values = [step % 3 == 0 for step in steps]
    return platform.reshape(platform.tensor(values, x.dtype), x.shape)


def filled(args: Sequence[Any]) -> list[Any]:
    """The arguments with a tensor for each that one stands for."""
    made = iter([numbers(x, i) for i, x in enumerate(tensors_of(args))])
    return [_filled(arg, made) for arg in args]


def tensors_of(args: Sequence[Any]) -> Iterator[T]:
    """What stands for tensors among arguments, also in lists."""
    for arg in args:
        if isinstance(arg, T):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from tensors_of(arg)


def _filled(arg: Any, made: Iterator[Any]) -> Any:
    if isinstance(arg, (list, tuple)):
        return type(arg)(_filled(x, made) for x in arg)
    return next(made) if isinstance(arg, T) else arg


def _shown(arg: Any) -> str:
    if isinstance(arg, T):
        return "x".join(map(str, arg.shape)) or "scalar"
    return f"({' '.join(map(_shown, arg))})" if isinstance(arg, (list, tuple)) else str(arg)
