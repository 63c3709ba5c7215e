"""From one placement to another on one mesh: a plan of steps, each along one mesh dim, and its execution."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor import conversions
from hp_dtensor.chunk import chunk_sizes
from hp_dtensor.conversions import Cut
from hp_dtensor.placements import PARTIAL, REPLICATE, Partial, Placement, Shard
from hp_dtensor.spec import Spec, local_block
from hp_platform import get_platform

Tensor = Any
Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Move:
    """One step of a plan: along one mesh dim, from one placement to the next."""

    mesh_dim: int
    source: Placement
    target: Placement
    before: Placements
    """All placements when the step begins: they say how long the dims are that it cuts or joins."""


def plan_moves(source: Placements, target: Placements) -> list[Move]:
    """The steps from ``source`` to ``target``; the same on all ranks.

    [Note: nested cuts] If several mesh dims cut one tensor dim, the leftmost makes the outer cut. So an outer cut can be
    made or undone only while no inner one exists: inner cuts that stand in the way are joined first and made again after,
    even where source and target have them alike.

    What costs nothing and shrinks the tensor comes first (slices), then what moves the fewest bytes, joins last.
    """
    at = list(source)
    moves: list[Move] = []

    def move(mesh_dim: int, to: Placement) -> None:
        moves.append(Move(mesh_dim, at[mesh_dim], to, tuple(at)))
        at[mesh_dim] = to

    # An average is a sum of scaled values; in between there are only sums.
    for mesh_dim, (now, wanted) in enumerate(zip(source, target, strict=True)):
        if now != wanted and now.is_partial("avg"):
            move(mesh_dim, PARTIAL)
    goal = [PARTIAL if wanted.is_partial() and at[i] != wanted else wanted for i, wanted in enumerate(target)]
    unsettled = _unsettled(at, goal)
    while unsettled:
        mesh_dim, to = next(_possible(at, goal, unsettled))
        move(mesh_dim, to)
        if to == goal[mesh_dim]:
            unsettled.remove(mesh_dim)
    for mesh_dim, wanted in enumerate(target):
        if at[mesh_dim] != wanted:
            move(mesh_dim, wanted)
    return moves


def _unsettled(at: Sequence[Placement], goal: Sequence[Placement]) -> list[int]:
    """Mesh dims that must change, or whose cut is in the way of one that must."""
    found: set[int] = set()
    while True:
        more = {
            i
            for i in range(len(at))
            if i not in found and (at[i] != goal[i] or _in_the_way(i, at, goal, found))
        }
        if not more:
            return sorted(found)
        found = found | more


def _in_the_way(i: int, at: Sequence[Placement], goal: Sequence[Placement], changing: Iterable[int]) -> bool:
    return isinstance(at[i], Shard) and any(
        outer < i and at[i] in (at[outer], goal[outer]) for outer in changing
    )


def _possible(
    at: Sequence[Placement], goal: Sequence[Placement], unsettled: Sequence[int]
) -> Iterator[tuple[int, Placement]]:
    """The steps that may come next, the best first; the last ones can always be made."""

    def may_cut(mesh_dim: int, to: Placement) -> bool:
        inner_cut = any(at[j] == to for j in range(mesh_dim + 1, len(at)))
        outer_missing = any((at[k] == to) != (goal[k] == to) for k in range(mesh_dim))
        return not inner_cut and not outer_missing

    def may_join(mesh_dim: int) -> bool:
        return not any(at[j] == at[mesh_dim] for j in range(mesh_dim + 1, len(at)))

    cuts = [i for i in unsettled if isinstance(goal[i], Shard) and at[i] != goal[i] and may_cut(i, goal[i])]
    yield from ((i, goal[i]) for i in cuts if at[i].is_replicate())
    yield from ((i, goal[i]) for i in cuts if at[i].is_partial())
    yield from ((i, goal[i]) for i in cuts if at[i].is_shard() and may_join(i))
    joins = [i for i in reversed(unsettled) if at[i].is_shard() and may_join(i)]
    yield from ((i, PARTIAL) for i in unsettled if goal[i] == PARTIAL and at[i].is_replicate())
    yield from ((i, PARTIAL) for i in joins if goal[i] == PARTIAL)
    yield from ((i, REPLICATE) for i in unsettled if at[i].is_partial() and goal[i].is_replicate())
    yield from ((i, REPLICATE) for i in joins)
    # A sum that is to be cut inside of a cut that can only be made later.
    yield from ((i, REPLICATE) for i in unsettled if at[i].is_partial())


def run_moves(
    local: Tensor, spec: Spec, moves: Sequence[Move], varying: frozenset[int] = frozenset()
) -> Tensor:
    """Carry out a plan on this rank's piece of a tensor of ``spec``.

    ``varying``: mesh dims whose joined value goes into an operation that differs along them. Differentiable.
    Communication: what the table in :mod:`hp_dtensor.conversions` says for each step; none along mesh dims of size 1.
    """
    for move in moves:
        if spec.mesh.shape[move.mesh_dim] > 1:
            local = _run(local, spec, move, move.mesh_dim in varying)
    return local


def _run(local: Tensor, spec: Spec, move: Move, varying: bool) -> Tensor:
    source, target = move.source, move.target
    group = spec.mesh.get_group(move.mesh_dim)
    if isinstance(source, Partial) and isinstance(target, Partial):
        _check_can_average(local)
        return local / group.size if target == PARTIAL else local * group.size
    if isinstance(source, Shard) and isinstance(target, Shard):
        cuts = _cut(spec, move, source.dim), _cut(spec, move, target.dim)
        return conversions.all_to_all(local, *cuts)
    if isinstance(source, Shard):
        cut = _cut(spec, move, source.dim)
        if target.is_partial():
            return conversions.pad(local, cut)
        return (conversions.gather_varying if varying else conversions.gather)(local, cut)
    if isinstance(target, Shard):
        cut = _cut(spec, move, target.dim)
        return (conversions.reduce_scatter if source.is_partial() else conversions.slice_out)(local, cut)
    if source.is_partial():
        return conversions.all_reduce(local, group)
    return conversions.keep_on(local, spec.mesh.get_coordinate()[move.mesh_dim] == 0)


def _check_can_average(local: Tensor) -> None:
    platform = get_platform()
    if not platform.is_floating(local.dtype):
        raise ValueError(
            f"Partial('avg') of {platform.dtype_name(local.dtype)} would round: use a floating dtype, or Partial('sum')"
        )


def _cut(spec: Spec, move: Move, dim: int) -> Cut:
    """How ``dim`` is dealt along the move's mesh dim: what the cuts of outer mesh dims have left of it, in chunks."""
    mesh, i = spec.mesh, move.mesh_dim
    coordinate = mesh.get_coordinate()
    left, _ = local_block(spec.shape, move.before[:i], mesh.shape[:i], coordinate[:i])
    sizes = chunk_sizes(left[dim], mesh.shape[i])
    return Cut(mesh.get_group(i), mesh.group_positions(i), coordinate[i], dim, sizes)


def moves_between(source: Spec, target: Spec) -> list[Move]:
    """The plan from one spec to another of the same mesh, made once."""
    key = ("moves", source, target)
    found = source.plans.get(key)
    if found is None:
        found = source.plans[key] = plan_moves(source.placements, target.placements)
    return found
