"""Operations whose dims have labels: what has the same label on several tensors is cut on all of them alike.

Matrix products, convolutions, attention, pooling and matrix functions are all of this kind. A label that the results lack is
contracted: cut there, every rank computes a summand. A product with one factor that is a sum is a sum.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hp_dtensor.no_elements import zeros_from
from hp_dtensor.placements import PARTIAL, REPLICATE, Partial, Placement, Shard
from hp_dtensor.rules.choice import Way, choose
from hp_dtensor.rules.registry import Outcome, Placements, Result
from hp_dtensor.spec import Spec, local_block
from hp_platform import get_platform

Labels: TypeAlias = tuple[str, ...]
"""One per dim. A dim with the label ``""`` is never cut: one that stretches, or along which the operation needs all."""
Place: TypeAlias = "int | tuple[int, int]"


class Role(enum.Enum):
    """What an operand is to the operation."""

    FACTOR = enum.auto()
    """The result is linear in it, the other operands fixed."""
    SUMMAND = enum.auto()
    """It is added to the rest."""
    PLAIN = enum.auto()
    """Nothing is linear in it."""


@dataclass(frozen=True)
class Operand:
    """A tensor among the arguments."""

    place: Place
    """Its position, or the position of its list and its place in it."""
    spec: Spec
    labels: Labels
    role: Role = Role.FACTOR


@dataclass(frozen=True)
class Labelled:
    """One of the results."""

    labels: Labels
    shape: tuple[int, ...]
    """Global."""


def labelled(
    operands: Sequence[Operand],
    results: Sequence[Labelled],
    *,
    evenly: Mapping[str, int] | None = None,
    more_ways: Sequence[Way] = (),
    is_tuple: bool = False,
) -> Outcome:
    """How the operands must lie, and how the results then do.

    Args:
        operands: all tensors among the arguments.
        results: one, or several that have all labels but the contracted ones.
        evenly: labels whose dims have different sizes on different operands (heads of queries and of keys): they are cut only
            where the smallest of these sizes, which is given here, divides by the number of ranks.
        more_ways: ways to cut along any one mesh dim that are no label's; inputs in the order of ``operands``.
        is_tuple: whether the operation gives a tuple, even of one result.
    """
    state = _State(operands, results, evenly or {})
    mesh = operands[0].spec.mesh
    for mesh_dim in range(len(mesh.shape)):
        state.choose(mesh_dim, mesh.shape[mesh_dim], more_ways)
    wishes: list[Any] = []
    for operand, wanted in zip(operands, state.wanted, strict=True):
        position, inner = operand.place if isinstance(operand.place, tuple) else (operand.place, None)
        wishes.extend([None] * (position + 1 - len(wishes)))
        if inner is None:
            wishes[position] = tuple(wanted)
        else:
            members = list(wishes[position] or ())
            members.extend([None] * (inner + 1 - len(members)))
            members[inner] = tuple(wanted)
            wishes[position] = tuple(members)
    if is_tuple or len(results) > 1:
        of_results = tuple(
            Result(tuple(output), result.shape) for output, result in zip(state.outputs, results, strict=True)
        )
        return Outcome(tuple(wishes), None, outputs=of_results)
    return Outcome(tuple(wishes), tuple(state.outputs[0]), results[0].shape)


class _State:
    """What has been decided for the mesh dims so far."""

    def __init__(
        self, operands: Sequence[Operand], results: Sequence[Labelled], evenly: Mapping[str, int]
    ) -> None:
        self.operands, self.results, self.evenly = operands, results, evenly
        self.wanted: list[list[Placement]] = [[] for _ in operands]
        self.outputs: list[list[Placement]] = [[] for _ in results]
        self.num_cuts = [dict.fromkeys(range(len(operand.labels)), 1) for operand in operands]

    def choose(self, mesh_dim: int, num_ranks: int, more_ways: Sequence[Way]) -> None:
        operands = self.operands
        now = [operand.spec.placements[mesh_dim] for operand in operands]
        # Only labels of dims that are cut now: no other one can be cheaper.
        asked = {
            operand.labels[p.dim]: None
            for operand, p in zip(operands, now, strict=True)
            if isinstance(p, Shard) and operand.labels[p.dim]
        }
        ways: dict[Way, list[Placement]] = {}
        for label in asked:
            if self._can_cut(label, num_ranks):
                way, outputs = self._cut(label)
                ways[way] = outputs
        for way in (*self._sums(now), *more_ways):
            ways[way] = [way.output] * len(self.results)
        whole = Way((REPLICATE,) * len(operands), REPLICATE)
        ways[whole] = [REPLICATE] * len(self.results)
        size = sum(math.prod(result.shape) for result in self.results)
        best = choose([operand.spec for operand in operands], mesh_dim, list(ways), size)
        for i, placement in enumerate(best.inputs):
            self.wanted[i].append(placement)
            if isinstance(placement, Shard):
                self.num_cuts[i][placement.dim] = self.num_cuts[i][placement.dim] * num_ranks
        for output, placement in zip(self.outputs, ways[best], strict=True):
            output.append(placement)

    def _can_cut(self, label: str, num_ranks: int) -> bool:
        places = [
            (i, dim)
            for i, operand in enumerate(self.operands)
            for dim, own in enumerate(operand.labels)
            if own == label
        ]
        if len({i for i, _ in places}) < len(places):
            return False  # twice on one operand: its diagonal is asked for
        smallest = self.evenly.get(label)
        if smallest is None:
            return True
        cuts = {self.num_cuts[i][dim] for i, dim in places}
        return len(cuts) == 1 and smallest % (cuts.pop() * num_ranks) == 0

    def _cut(self, label: str) -> tuple[Way, list[Placement]]:
        if any(label in result.labels for result in self.results):
            outputs = [_of_label(result.labels, label) for result in self.results]
            inputs = [_of_label(operand.labels, label) for operand in self.operands]
        else:
            outputs = [PARTIAL] * len(self.results)
            inputs = [
                PARTIAL if operand.role is Role.SUMMAND else _of_label(operand.labels, label)
                for operand in self.operands
            ]
        return Way(tuple(inputs), outputs[0]), outputs

    def _sums(self, now: Sequence[Placement]) -> list[Way]:
        """One factor is a sum, the others are whole; what is added becomes a sum of the same kind."""
        ways = []
        roles = [operand.role for operand in self.operands]
        for i, kind in enumerate(now):
            if not isinstance(kind, Partial) or roles[i] is Role.PLAIN:
                continue
            carrier = i if roles[i] is Role.FACTOR else roles.index(Role.FACTOR)
            inputs = [
                kind if other == carrier or role is Role.SUMMAND else REPLICATE
                for other, role in enumerate(roles)
            ]
            ways.append(Way(tuple(inputs), kind))
        return ways


def _of_label(labels: Labels, label: str) -> Placement:
    return Shard(labels.index(label)) if label in labels else REPLICATE


def aligned(own: tuple[int, ...], shape: tuple[int, ...], labels: Labels) -> Labels:
    """The labels of an operand that stretches to ``shape``, whose dims have ``labels``: the last ones, but for dims that stretch."""
    shift = len(shape) - len(own)
    return tuple(labels[dim + shift] if size == shape[dim + shift] else "" for dim, size in enumerate(own))


def numbered(name: str, count: int) -> Labels:
    """``count`` labels."""
    return tuple(f"{name} {i}" for i in range(count))


# ------------------------------------------------------------------------------------------------- where there is nothing
def lies(operand: Operand, outcome: Outcome) -> Placements:
    """The placements in which the operation gets an operand."""
    if isinstance(operand.place, tuple):
        return outcome.inputs[operand.place[0]][operand.place[1]]
    return outcome.inputs[operand.place]


def local_shape(spec: Spec, placements: Placements, shape: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Of this rank's piece of a tensor on the mesh of ``spec``."""
    mesh = spec.mesh
    sizes, _ = local_block(
        spec.shape if shape is None else shape, placements, mesh.shape, mesh.get_coordinate()
    )
    return sizes


def contracts_nothing(operands: Sequence[Operand], results: Sequence[Labelled], outcome: Outcome) -> bool:
    """Whether this rank's summand is zero, because a dim that is summed has no elements here."""
    known = {label for result in results for label in result.labels}
    return any(
        size == 0 and label not in known
        for operand in operands
        if operand.role is Role.FACTOR
        for size, label in zip(local_shape(operand.spec, lies(operand, outcome)), operand.labels, strict=True)
    )


def zeros_of_product(shape: tuple[int, ...], factors: Sequence[Any]) -> Any:
    """Zeros of the dtype that a product of these tensors has here (autocast may say otherwise), with gradients of zeros."""
    platform = get_platform()
    with platform.no_grad():
        ones = [platform.zeros((1, 1), x.dtype, platform.device_of(x)) for x in factors[:2]]
        dtype = platform.matmul(ones[0], ones[-1]).dtype
        like = platform.zeros(shape, dtype, platform.device_of(factors[0]))
    return zeros_from(like, factors)
