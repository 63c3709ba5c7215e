"""Rules: for a family of operations, pure functions from specs and arguments to what each rank must do.

A rule gets the operation's arguments with a :class:`hp_dtensor.spec.Spec` in the place of every DTensor, and returns an
:class:`Outcome`. It knows no framework: tables say which functions of a framework follow which rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hp_dtensor.placements import REDUCE_OPS, REPLICATE, Placement
from hp_dtensor.spec import Spec

Placements = tuple[Placement, ...]
Normalise = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
_Recipe = tuple[tuple[tuple[str | None, Any], ...], tuple[str, ...]]
"""Arguments to add by position, each by its name in the call or (None) its default; and the names that stay keywords."""
REQUIRED = object()
EVERY_KIND: Mapping[str, str] = {op: op for op in REDUCE_OPS}
"""Of :attr:`Rule.carries`, for what only gives values other places, repeats or leaves out some: each element is reduced by itself."""

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
class Result:
    """One of several results of an operation."""

    placements: Placements
    shape: tuple[int, ...]
    """Global."""


@dataclass(frozen=True)
class Outcome:
    """What a rule answers."""

    inputs: tuple[Any, ...]
    """For each positional argument that is a spec, the placements in which the operation wants it; None for the others.

    For an argument that is a tuple of tensors: a tuple with the placements (or None) for each. Missing ones at the end are
    None. Where an input is Replicate along a mesh dim and the output is not, the caller lets its gradient be summed there.
    """
    output: Placements | None
    """Of the result. None if the operation gives no tensor: its value is handed out as it is, so all ranks must agree."""
    shape: tuple[int, ...] = ()
    """Global shape of the result."""
    replaced: Mapping[int, Any] = field(default_factory=dict)
    """Positional arguments that are different on local tensors, such as the shape given to view."""
    run: Callable[..., Any] | None = None
    """Runs on the local arguments instead of the operation itself."""
    prepare: Callable[[list[Any]], list[Any]] | None = None
    """Changes the local arguments just before the operation itself runs, where it takes values to say how."""
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    """Given the operation itself, what runs instead on the local arguments: a rule that works with the framework's kernel."""
    outputs: tuple[Result | None, ...] | None = None
    """Of an operation with several results (then ``output`` and ``shape`` do not count), one each; None for what is no tensor.

    Along a mesh dim they are Replicate all, or none is: the gradients of the inputs are counted alike for all.
    """
    is_sized_by_values: bool = False
    """Whether only the values say how large the results are (then ``output`` is None): inputs and results are Replicate."""

    checks: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)
    """Of tensors whose values may be refused, by position: what does so, where the operation itself would not see them all.

    That is where a whole one is cut (then every rank looks at it before), and where the result has no elements. The value that
    is returned does not count.
    """
    meets_others: bool = False
    """Whether ``run`` communicates on the way to a result that is cut, so that a rank without elements must run it, too."""

    @staticmethod
    def of_values(*args: Any) -> Outcome:
        """Of an operation whose results are as large as the values say: every rank needs all of every tensor among ``args``."""

        def whole(x: Any) -> Any:
            if isinstance(x, Spec):
                return (REPLICATE,) * len(x.placements)
            return tuple(map(whole, x)) if isinstance(x, tuple) else None

        return Outcome(tuple(map(whole, args)), None, is_sized_by_values=True)


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
    normalise: Normalise | None = None
    """Brings the arguments of a call into the form that ``plan`` takes, before anything else: hashable where not tensors."""
    in_place: bool = False
    """Whether the operation writes its result into its first argument, which therefore stays as it lies."""
    functional: Callable[..., Any] | None = None
    """The same operation that makes a new tensor. For in-place ones whose operands would have to move first."""
    views: bool = False
    """Whether results of the unsharded operation share the memory of its one tensor: writing into them would reach that."""

    carries: Mapping[str, str] = field(default_factory=dict)
    """The kinds of Partial beside sums and averages that go through, and the kinds that the results then are.

    Of all tensors of the first argument, if they lie so alike; zeros may come in beside their values.
    """

    _recipes: dict[tuple[Any, ...], _Recipe] = field(init=False, default_factory=dict, repr=False)
    """For each way to spell a call (how many by position, which names) what :meth:`bind` does."""
    _in_place: dict[Any, Rule] = field(init=False, default_factory=dict, repr=False)
    """What :meth:`writing` has given: plans are found by their rule, so it is made once."""
    binds: bool = field(init=False)
    """Whether :meth:`bind` has something to do where no argument is given by keyword."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "binds", self.packs is not None or self.normalise is not None)

    def writing(self, functional: Callable[..., Any] | None) -> Rule:
        """The rule of the same operation in place."""
        found = self._in_place.get(functional)
        if found is None:
            found = self._in_place.setdefault(functional, replace(self, in_place=True, functional=functional))
        return found

    def taking(self, params: Sequence[str | tuple[str, Any]]) -> Rule:
        """The rule of an operation that has other names for its arguments."""
        return replace(self, params=_signature(params))

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All spellings of a call as one: named arguments that have a position in it, loose integers in a tuple."""
        if self.packs is not None and len(args) > self.packs and isinstance(args[self.packs], int):
            args = (*args[: self.packs], tuple(args[self.packs :]))
        rest: dict[str, Any] = {}
        if kwargs:
            if kwargs.get("out") is not None:
                raise ValueError("out= is not taken: use the result, or write it with copy_()")
            spelling = (len(args), *kwargs)
            recipe = self._recipes.get(spelling)
            if recipe is None:
                recipe = self._recipes[spelling] = self._recipe(len(args), kwargs)
            added, kept = recipe
            args = (*args, *[default if name is None else kwargs[name] for name, default in added])
            rest = {name: kwargs[name] for name in kept}
        if self.normalise is not None:
            args, rest = self.normalise(args, rest)
        return args, rest

    def _recipe(self, num_args: int, names: Iterable[str]) -> _Recipe:
        """Where the arguments of these names go, beside so many by position. ValueError for a wrong call."""
        rest = [name for name in names if name != "out"]
        named = {_SYNONYMS.get(name, name): name for name in rest}
        known = {_SYNONYMS.get(name, name) for name, _ in self.params}
        last = max(
            (i for i, (name, _) in enumerate(self.params) if _SYNONYMS.get(name, name) in named),
            default=-1,
        )
        added: list[tuple[str | None, Any]] = []
        for name, default in self.params[num_args : last + 1]:
            given = named.get(_SYNONYMS.get(name, name))
            if given is None and default is REQUIRED:
                raise ValueError(f"{self.name} needs its argument {name!r}")
            added.append((given, default))
            if given is not None:
                rest.remove(given)
        twice = [named[name] for name in named if name in known and named[name] in rest]
        if twice:
            raise ValueError(f"{self.name} got its argument {twice[0]!r} twice: by position and by name")
        return tuple(added), tuple(rest)


def _signature(params: Sequence[str | tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    return tuple((p, REQUIRED) if isinstance(p, str) else p for p in params)


RULES: dict[str, Rule] = {}
"""Every rule by its name; filled when the modules of the families are imported."""


def rule(
    name: str,
    *,
    params: Sequence[str | tuple[str, Any]] = (),
    packs: int | None = None,
    by_value: bool = True,
    in_place: bool = False,
    normalise: Normalise | None = None,
    views: bool = False,
    carries: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
    """Enter a function as the rule ``name``: a decorator.

    Args:
        name: by which tables of functions, and ``DFunction._op_name``, refer to it. ValueError if it is taken.
        params: names of the positional arguments, with their default where they have one: ``("input", ("dim", None))``.
            A keyword argument with such a name (or a synonym: axis, mat2, ...) is put in its position.
        packs: from this position on, loose integers are one tuple.
        by_value: False where plans depend on the types of scalar arguments only.
        in_place: whether the operation writes into its first argument; ``plan`` must then leave that as it lies.
        normalise: see :attr:`Rule.normalise`.
        views: whether the results of the unsharded operation on one tensor share its memory.
        carries: see :attr:`Rule.carries`; views carry every kind.
    """
    kinds = dict(EVERY_KIND if carries is None and views else carries or {})
    signature = _signature(params)

    def enter(plan: Callable[..., Outcome]) -> Callable[..., Outcome]:
        if name in RULES:
            raise ValueError(f"there is a rule {name!r} already; choose another name")
        RULES[name] = Rule(
            name, plan, signature, packs, by_value, normalise, in_place, views=views, carries=kinds
        )
        return plan

    return enter
