"""The calls that the tests of the rules make, in one form."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_platform import get_platform
from nox_support.house import ROOT

TESTS = ROOT / "packages" / "hp-dtensor" / "tests"
FOLDERS = {"torch": "torch_only", "mindspore": "mindspore_only"}
"""Where the tests stand that call a framework's own functions."""


@dataclass(frozen=True)
class Sketch:
    """Stands for a tensor: floats or complex numbers within bounds, whole numbers from 0 to below a bound, or truth values."""

    shape: tuple[int, ...]
    dtype: str = "float64"
    low: float = -3.75
    high: float = 3.75


@dataclass(frozen=True)
class Call:
    """``function(*args, **kwargs)``, which follows the rule; a sketch stands for each tensor, also in lists."""

    rule: str
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """As a reader writes it, with shapes for tensors: ``sum(5x3, 0)``."""
        name = getattr(self.function, "__name__", self.rule)
        name = name if name.isidentifier() and name != "call" and not name.startswith("_") else self.rule
        given = [*map(_shown, self.args), *(f"{key}={value}" for key, value in self.kwargs.items())]
        return f"{name}({', '.join(given)})"


def calls(framework: str) -> Iterator[Call]:
    """Every call in the tables of the tests that run on this framework."""
    folder = TESTS / FOLDERS[framework]
    for path in (TESTS, folder):
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
    if framework == "torch":  # the calls that both frameworks share are told once
        yield from _shared_calls(importlib.import_module("test_rules"))
    for path in sorted(folder.glob("test_rules_of_*.py")):
        for entry in importlib.import_module(path.stem).CASES.values():
            yield Call(entry.rule, entry.function, _sketched(entry.args), entry.kwargs)


def _shared_calls(tests: Any) -> Iterator[Call]:
    platform = get_platform()
    for rule, shapes, function in tests.CASES.values():
        yield Call(rule, function(platform), [Sketch(shape) for shape in shapes])
    for rule, shape, args, function in tests.VIEWS.values():
        yield Call(rule, function(platform), [Sketch(shape), *args])


def _sketched(args: Any) -> Any:
    """The arguments with a sketch for each ``T`` of a test module."""
    if isinstance(args, (list, tuple)):
        return type(args)(map(_sketched, args))
    if type(args).__name__ != "T":
        return args
    return Sketch(args.shape, args.dtype, args.low, args.high)


def _shown(arg: Any) -> str:
    if isinstance(arg, Sketch):
        return "x".join(map(str, arg.shape)) or "scalar"
    if isinstance(arg, (list, tuple)):
        return f"({', '.join(map(_shown, arg))})"
    if hasattr(arg, "entries"):  # what stands between brackets
        return f"[{', '.join(map(_subscript, arg.entries))}]"
    return str(arg)


def _subscript(entry: Any) -> str:
    if isinstance(entry, tuple):
        start, stop, step = ("" if x is None else str(x) for x in entry)
        return f"{start}:{stop}" + (f":{step}" if step else "")
    return "..." if entry is Ellipsis else str(entry)
