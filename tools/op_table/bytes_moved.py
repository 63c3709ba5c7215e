"""What a call moves between ranks, by the rule's answer: nothing of it runs but collectives that the operation itself starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_dtensor.nest import leaves, map_leaves
from hp_dtensor.pieces import coordinates, piece
from hp_dtensor.placements import REPLICATE, Placement
from hp_dtensor.plan import Plan
from hp_dtensor.plan_making import plan_of, with_wishes
from hp_dtensor.redistribution_plan import elements_of_move
from hp_dtensor.rules import RULES
from hp_dtensor.rules_view import ask
from hp_dtensor.simulation import CheckerMesh, Replies
from hp_dtensor.spec import make_spec
from hp_platform import get_platform
from op_table.calls import Call, Sketch

MESH = (2,)
"""The table's mesh. One dim says all: rules work along each mesh dim by itself."""

Tensor = Any


@dataclass(frozen=True)
class Answer:
    """How the results lie, and the bytes that a rank sends for them, as a share of the bytes of all tensors of the call."""

    results: tuple[Placement | None, ...]
    """None for what is no tensor."""
    share: float


def answer(call: Call, placements: Sequence[Placement], tensors: Sequence[Tensor]) -> Answer:
    """What the rule of a call answers for tensors that lie so on a mesh of two ranks."""
    counting = _Counting()
    while True:
        plans = []
        for coordinate in coordinates(MESH):
            mesh = CheckerMesh(MESH, coordinate, counting)
            specs = [make_spec(mesh, (p,), tuple(x.shape)) for p, x in zip(placements, tensors, strict=True)]
            given, kwargs = bound(call, specs)
            outcome = ask(RULES[call.rule], given, kwargs)
            plan = plan_of(outcome, given)
            plans.append(plan)
            if plan.run is not None or plan.prepare is not None or plan.around is not None:
                wanted = [wish or spec.placements for _, spec, wish in with_wishes(given, outcome.inputs)]
                pieces = [piece(x, p, MESH, coordinate) for x, p in zip(tensors, wanted, strict=True)]
                local = [list(arg) if isinstance(arg, tuple) else arg for arg in bound(call, pieces)[0]]
                for position, value in plan.replaced:
                    local[position] = value
                plan.call(call.function, local, kwargs)
        if counting.settle(MESH):
            break
    nbytes = counting.nbytes + _of_moves(plans[0], tensors, given)
    total = sum(map(_nbytes, tensors))
    return Answer(_results(plans[0], tensors), nbytes / total if total else 0.0)


def filled(call: Call, values: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of a call with other values in the places of its tensors; lists as tuples."""
    left = iter(values)

    def tuples(x: Any) -> Any:
        return tuple(map(tuples, x)) if isinstance(x, (list, tuple)) else x

    return tuples(map_leaves(lambda x: next(left) if isinstance(x, Sketch) else x, list(call.args)))


def sketches(call: Call) -> list[Sketch]:
    """The tensors of a call."""
    return [x for x in leaves(list(call.args)) if isinstance(x, Sketch)]


def bound(call: Call, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments in the form that the rule takes."""
    rule, args = RULES[call.rule], filled(call, values)
    return rule.bind(args, call.kwargs) if call.kwargs or rule.binds else (args, {})


def _results(plan: Plan, tensors: Sequence[Tensor]) -> tuple[Placement | None, ...]:
    if plan.whole_on is not None:
        return (REPLICATE,)
    specs = plan.outputs if plan.outputs is not None else (plan.output,)
    return tuple(None if spec is None else spec.placements[0] for spec in specs)


def _of_moves(plan: Plan, tensors: Sequence[Tensor], given: Sequence[Any]) -> float:
    places = [place for place, _, _ in with_wishes(given, ())]
    return sum(
        elements_of_move(move.spec, step, MESH[0]) * _itemsize(tensors[places.index(move.place)])
        for move in plan.moves
        for step in move.moves
    )


def _itemsize(x: Tensor) -> int:
    return get_platform().to_numpy(x).dtype.itemsize


def _nbytes(x: Tensor) -> int:
    return math.prod(x.shape) * _itemsize(x)


@dataclass
class _Counting(Replies):
    """Replies that know what a ring sends for them: 2 (w - 1) / w of what is reduced, (w - 1) of the piece that is gathered."""

    nbytes: float = field(default=0.0)

    def settle(self, mesh_shape: tuple[int, ...]) -> bool:
        if self.noted:
            kind, mesh_dim, _ = next(iter(self.noted.values()))
            largest = max(_nbytes(x) for _, _, x in self.noted.values())
            w = mesh_shape[mesh_dim]
            self.nbytes = self.nbytes + largest * (w - 1) * (1 if kind == "gather" else 2 / w)
        return super().settle(mesh_shape)
