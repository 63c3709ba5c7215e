"""Whether two functions that rules made run the same program: the rule checker runs each program of a call once.

[Note: the same program] A rule answers many combinations of placements alike, since it wants the same inputs in all of them:
what lies otherwise is moved first. Then every rank runs the same operation on the same pieces, and one check serves all.
What rules give beside placements and shapes are functions, often made anew for each answer. Two of them are the same program
if they have the same code and the same values in their closures and defaults, down to numbers, shapes and specs. Anything
that cannot be compared so counts as itself alone: then a program may run twice, but none is ever left out.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

_OF_RULES = "hp_dtensor.rules."
"""Objects of the rules' own classes are what their attributes are."""


class _Itself:
    """Equal to itself alone; keeps the object alive, so that no other one gets its identity."""

    def __init__(self, x: object) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.x is self.x

    def __hash__(self) -> int:
        return id(self.x)


def program(x: Any, outer: tuple[int, ...] = ()) -> Hashable:
    """A value that is equal for another object only if both do the same: see [Note: the same program]."""
    if x is None:
        return None
    if isinstance(x, (bool, int, str, bytes)):
        return type(x), x
    if isinstance(x, (float, complex)):
        return type(x), repr(x)
    if id(x) in outer:  # a function that calls itself
        return "outer", len(outer) - outer.index(id(x))
    inside = (*outer, id(x))
    if isinstance(x, FunctionType):
        cells = tuple(_cell(cell, inside) for cell in x.__closure__ or ())
        given = program(x.__defaults__, inside), program(x.__kwdefaults__, inside)
        return x.__module__, x.__code__, cells, given
    if isinstance(x, MethodType):
        return "method", program(x.__func__, inside), program(x.__self__, inside)
    if isinstance(x, functools.partial):
        return "partial", program(x.func, inside), program(x.args, inside), program(x.keywords, inside)
    if isinstance(x, (tuple, list)):
        return type(x), tuple([program(one, inside) for one in x])
    if isinstance(x, (set, frozenset)):
        return type(x), frozenset([program(one, inside) for one in x])
    if isinstance(x, Mapping):
        return type(x), tuple([(program(name, inside), program(one, inside)) for name, one in x.items()])
    if is_dataclass(x) and not isinstance(x, type):
        return type(x), tuple([program(getattr(x, one.name), inside) for one in fields(x)])
    if type(x).__module__.startswith(_OF_RULES) and hasattr(x, "__dict__"):
        return type(x), program(vars(x), inside)
    return _Itself(x)


def _cell(cell: CellType, inside: tuple[int, ...]) -> Hashable:
    try:
        return program(cell.cell_contents, inside)
    except ValueError:  # a variable that has no value yet
        return "empty"
