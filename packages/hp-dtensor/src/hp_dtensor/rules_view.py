"""How rules see the tensors of a call: cuts in the order of the mesh dims, sums as the only reductions, blocks only.

[Note: what rules need not know] A rule reads placements one mesh dim at a time, the first one outermost. To keep that
simple and right, three things are translated before a rule is asked, and its answer is translated back:

* Another cut order (StridedShard): the rule sees a mesh whose dims are in the order of the cuts, so all its placements are
  plain. A tensor whose order fits no common one is seen in the common order; where the rule's wish differs from how the
  tensor really lies, it is moved like any other.
* A Partial that is no sum or average, and a RaggedShard, are seen as Replicate: so they are reduced, or gathered, first. But
  what works on runs as they lie (:mod:`hp_dtensor.rules_of_runs`) is not asked for. And where a rule gives the values of its
  tensors other places, or repeats or leaves out some (``Rule.carries``), any Partial goes through as a sum does, if all of them
  lie so: each element is reduced by itself, and zeros that ranks hold for others' parts reduce to zeros. Operations that change
  values do not carry a maximum, also where they are monotone: what they round to equal values would tie, and share a gradient
  that belongs to one. Only negation, which is exact, makes a maximum a minimum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hp_dtensor.cuts import Stack, stacks_of, with_stacks
from hp_dtensor.placements import PARTIAL, REPLICATE, Partial, Placement, RaggedShard, Shard, StridedShard
from hp_dtensor.rules.registry import Outcome, Result, Rule
from hp_dtensor.rules_of_runs import of_runs
from hp_dtensor.spec import Mesh, Spec, make_spec

Placements = tuple[Placement, ...]


def ask(rule: Rule, given: Sequence[Any], kwargs: Mapping[str, Any]) -> Outcome:
    """What the rule answers for these arguments, with a spec (or a tuple with specs) in the place of every tensor."""
    specs = [x for arg in given for x in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(x, Spec)]
    if not any(_is_special(p) for spec in specs for p in spec.placements):
        return rule.plan(*given, **kwargs)
    found = of_runs(rule, given, kwargs)
    if found is not None:
        return found
    kinds = _carried(rule, given)
    view = _View(specs[0].mesh, _common_order(specs))
    seen = [tuple(map(view.seen, arg)) if isinstance(arg, tuple) else view.seen(arg) for arg in given]
    if kinds:
        seen[0] = _mapped(lambda spec: view.seen(spec, kinds), given[0])
    outcome = rule.plan(*seen, **kwargs)
    wishes = [*outcome.inputs, *[None] * (len(given) - len(outcome.inputs))]
    outputs = outcome.outputs
    answer = replace(
        outcome,
        inputs=tuple(
            view.wishes(spec, as_seen, wish) for spec, as_seen, wish in zip(given, seen, wishes, strict=True)
        ),
        output=None if outcome.output is None else view.real(outcome.output, len(outcome.shape)),
        outputs=None if outputs is None else tuple(map(view.result, outputs)),
    )
    return _with_kinds(rule, answer, kinds) if kinds else answer


def _mapped(function: Callable[[Any], Any], arg: Any) -> Any:
    """Of a tensor, or of each of several."""
    return tuple(map(function, arg)) if isinstance(arg, tuple) else function(arg)


def _carried(rule: Rule, given: Sequence[Any]) -> dict[int, Partial]:
    """The Partials, by mesh dim, that go through though they are no sums: of all tensors of the first argument.

    All or none: where one is reduced, or another tensor would be made a Partial, the order of reductions would matter.
    """
    first, *others = given
    carriers = first if isinstance(first, tuple) else (first,)
    if not rule.carries or not all(isinstance(x, Spec) for x in carriers):
        return {}
    if any(_is_special(p) for x in others if isinstance(x, Spec) for p in x.placements):
        return {}
    kinds: dict[int, Partial] = {}
    for mesh_dim, column in enumerate(zip(*(x.placements for x in carriers), strict=True)):
        found = {p for p in column if isinstance(p, Partial)}
        if not found:
            continue
        if found != set(column) or len(found) > 1:
            return {}
        kind = found.pop()
        if not kind.is_linear:
            kinds[mesh_dim] = kind
    return kinds if {kind.reduce_op for kind in kinds.values()} <= set(rule.carries) else {}


def _with_kinds(rule: Rule, outcome: Outcome, kinds: Mapping[int, Partial]) -> Outcome:
    """The answer for a sum as that for the Partials that it stood for."""
    made = {i: Partial(rule.carries[kind.reduce_op]) for i, kind in kinds.items()}

    def real(placements: Any, of: Mapping[int, Partial]) -> Any:
        if placements is None:
            return None
        return tuple(of.get(i, p) if p.is_partial() else p for i, p in enumerate(placements))

    outputs = outcome.outputs
    if outputs is not None:
        outputs = tuple(
            None if r is None else replace(r, placements=real(r.placements, made)) for r in outputs
        )
    wish, *rest = outcome.inputs
    is_list = isinstance(wish, tuple) and not all(isinstance(p, Placement) for p in wish)
    own = tuple(real(one, kinds) for one in wish) if is_list else real(wish, kinds)
    return replace(outcome, inputs=(own, *rest), output=real(outcome.output, made), outputs=outputs)


def _is_special(placement: Placement) -> bool:
    if isinstance(placement, Partial):
        return not placement.is_linear
    return isinstance(placement, (StridedShard, RaggedShard))


def _common_order(specs: Sequence[Spec]) -> tuple[int, ...]:
    """The mesh dims in an order in which as many specs as possible, the first ones first, cut from left to right."""
    num_dims = len(specs[0].placements)
    inside: list[set[int]] = [set() for _ in range(num_dims)]  # what must come after a mesh dim
    for spec in specs:
        chains = [pair for stack in spec.cuts for pair in itertools.pairwise(stack)]
        if not any(_reaches(inside, b, a) for a, b in chains):
            for a, b in chains:
                inside[a].add(b)
    order: list[int] = []
    while len(order) < num_dims:
        left = [i for i in range(num_dims) if i not in order]
        order.append(next(i for i in left if not any(i in inside[j] for j in left)))
    return tuple(order)


def _reaches(inside: Sequence[set[int]], start: int, goal: int) -> bool:
    return start == goal or any(_reaches(inside, following, goal) for following in inside[start])


@dataclass(frozen=True)
class _View:
    mesh: Any
    order: tuple[int, ...]

    def seen(self, spec: Any, as_sums: Mapping[int, Placement] | None = None) -> Any:
        """The spec as the rule gets it; along the mesh dims ``as_sums`` it stands as a sum."""
        if not isinstance(spec, Spec):
            return spec
        placements: list[Placement] = []
        for mesh_dim in self.order:
            own = spec.placements[mesh_dim]
            if isinstance(own, StridedShard):
                placements.append(Shard(own.dim))
            else:
                stands = PARTIAL if as_sums and mesh_dim in as_sums else REPLICATE
                placements.append(stands if _is_special(own) else own)
        return make_spec(_ordered(spec.mesh, self.order), placements, spec.shape)

    def wishes(self, spec: Any, as_seen: Any, wish: Any) -> Any:
        """The wish for an argument; None leaves a tensor as it lies, if the rule saw it so."""
        if isinstance(spec, tuple):
            each = (None,) * len(spec) if wish is None else wish
            return tuple(self.wishes(*one) for one in zip(spec, as_seen, each, strict=True))
        if not isinstance(spec, Spec):
            return wish
        if wish is not None:
            return self.real(wish, len(spec.shape))
        placements = self.real(as_seen.placements, len(spec.shape))
        return None if placements == spec.placements else placements

    def result(self, result: Result | None) -> Result | None:
        """One of several results."""
        if result is None:
            return None
        return replace(result, placements=self.real(result.placements, len(result.shape)))

    def real(self, placements: Placements, ndim: int) -> Placements:
        """What the rule says, on the mesh itself."""
        found: list[Placement] = [REPLICATE] * len(self.order)
        for mesh_dim, placement in zip(self.order, placements, strict=True):
            found[mesh_dim] = placement
        of_view = stacks_of(placements, [self.mesh.shape[i] for i in self.order], ndim)
        stacks: list[Stack] = [tuple(self.order[i] for i in stack) for stack in of_view]
        return with_stacks(found, stacks, self.mesh.shape)


def _ordered(mesh: Any, order: tuple[int, ...]) -> Any:
    if order == tuple(range(len(order))):
        return mesh
    found = mesh.interned.get(("ordered", order))
    if found is None:
        found = mesh.interned["ordered", order] = OrderedMesh(mesh, order)
    return found


class OrderedMesh:
    """A mesh with its dims in another order, as far as rules look at it."""

    def __init__(self, mesh: Mesh, order: tuple[int, ...]) -> None:
        self._mesh: Any = mesh
        self._order = order
        self.shape = tuple(mesh.shape[i] for i in order)
        self.interned: dict[Any, Any] = {}

    def get_coordinate(self) -> tuple[int, ...] | None:
        """This rank's position along each dim."""
        coordinate = self._mesh.get_coordinate()
        return None if coordinate is None else tuple(coordinate[i] for i in self._order)

    def get_group(self, mesh_dim: int) -> Any:
        """The group along a dim."""
        return self._mesh.get_group(self._order[mesh_dim])

    def group_positions(self, mesh_dim: int) -> tuple[int, ...]:
        """For each coordinate along a dim its rank's position in the group."""
        return self._mesh.group_positions(self._order[mesh_dim])
