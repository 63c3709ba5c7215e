"""Rules: for a family of operations, pure functions from specs and arguments to what each rank must do.

A rule gets the operation's arguments with a :class:`hp_dtensor.spec.Spec` in the place of every DTensor, and returns an
:class:`Outcome`. It knows no framework: tables say which functions of a framework follow which rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_dtensor.placements import Placement

Placements = tuple[Placement, ...]
REQUIRED = object()

_SYNONYMS = {
    "axis": "dim",
    "dims": "dim",
    "keep_dims": "keepdim",
    "keepdims": "keepdim",
    "size": "shape",
    "mat2": "other",
    "tensor2": "other",
    "self": "input",
    "x": "input",
    "y": "other",
}


@dataclass(frozen=True)
class Outcome:
    """What a rule answers."""

    inputs: tuple[Placements | None, ...]
    """For each positional argument that is a spec, the placements in which the operation wants it; None for the others.

    Where an input is Replicate along a mesh dim and the output is not, the caller lets its gradient be summed there.
    """
    output: Placements
    shape: tuple[int, ...]
    """Global shape of the result."""
    replaced: Mapping[int, Any] = field(default_factory=dict)
    """Positional arguments that are different on local tensors, such as the shape given to view."""
    run: Callable[..., Any] | None = None
    """Runs on the local arguments instead of the operation itself."""


@dataclass(frozen=True, eq=False)
class Rule:
    """A rule with the signature of its operations."""

    name: str
    plan: Callable[..., Outcome]
    params: tuple[tuple[str, Any], ...]
    """Names and defaults of the arguments that may be given by keyword and count as positional."""
    packs: int | None
    """From this position on, loose integers are one tuple: ``view(2, 3)`` is ``view((2, 3))``."""
    by_value: bool
    """Whether the values of scalar arguments matter, and not only their types.

    Then they are in the key of the plan's cache. Scalars of elementwise operations do not matter: keeping them in the key
    would let the cache grow with every new learning rate.
    """

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All spellings of a call as one: named arguments that have a position in it, loose integers in a tuple."""
        if self.packs is not None and len(args) > self.packs and isinstance(args[self.packs], int):
            args = (*args[: self.packs], tuple(args[self.packs :]))
        rest = dict(kwargs)
        if rest:
            named = {_SYNONYMS.get(name, name): name for name in rest}
            last = max((i for i, (name, _) in enumerate(self.params) if name in named), default=-1)
            bound = list(args)
            for name, default in self.params[len(args) : last + 1]:
                value = rest.pop(named[name]) if name in named else default
                if value is REQUIRED:
                    raise ValueError(f"{self.name} needs its argument {name!r}")
                bound.append(value)
            args = tuple(bound)
        return args, rest


RULES: dict[str, Rule] = {}
"""Every rule by its name; filled when the modules of the families are imported."""


def rule(
    name: str,
    *,
    params: Sequence[str | tuple[str, Any]] = (),
    packs: int | None = None,
    by_value: bool = True,
) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
    """Enter a function as the rule ``name``. ``params`` are names, with their default where they have one."""
    signature = tuple((p, REQUIRED) if isinstance(p, str) else p for p in params)

    def enter(plan: Callable[..., Outcome]) -> Callable[..., Outcome]:
        if name in RULES:
            raise ValueError(f"there is a rule {name!r} already; choose another name")
        RULES[name] = Rule(name, plan, signature, packs, by_value)
        return plan

    return enter
