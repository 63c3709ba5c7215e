"""The cheapest sequence of steps from some placements to others on one mesh. Arithmetic only, the same on all ranks.

[Note: steps] Only the innermost cut of a tensor dim can be joined, and a new cut is made inside of all others (see [Note: cut
order] in :mod:`hp_dtensor.cuts`). So each step takes a mesh dim from the end of one stack, or puts it there, or both. The
steps and what a rank sends and receives in each, with s the elements that it holds before and w the ranks along the mesh dim:

===================  =================  ==================
step                 collective         elements
===================  =================  ==================
Replicate to Shard   none (slice)       0
Shard to Replicate   all-gather         s (w - 1)
Shard to Shard       all-to-all         s (w - 1) / w
Partial to Shard     reduce-scatter     s (w - 1) / w
Partial to Replicate all-reduce         2 s (w - 1) / w
anything to Partial  none               0
===================  =================  ==================

The path of the fewest elements is searched (Dijkstra); among equals that of the fewest launches, then of the fewest steps.

[Note: reductions that do not commute] Of several Partials the rightmost reduces first. While there is one of another kind
further right, a Partial is therefore neither reduced nor made. Of several extremes the values commute, but not the gradients:
where one is recorded, they too reduce from the right.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from hp_dtensor.cuts import Stack, shard_in, stacks_of
from hp_dtensor.placements import REPLICATE, Partial, Placement, Shard

Placements = tuple[Placement, ...]


class Step(Enum):
    """What a move does."""

    SLICE = "slice"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    TO_PARTIAL = "to partial"
    SCALE = "scale"
    EXCHANGE = "exchange"
    """Every rank gets the block it wants from the ranks that hold it: one all-to-all over the whole mesh."""


@dataclass(frozen=True)
class Move:
    """One step of a plan: along one mesh dim, from one placement to the next."""

    mesh_dim: int
    """-1: over the whole mesh."""
    source: Placement
    target: Placement
    step: Step
    before: Placements
    """All placements when the step begins."""
    after: Placements
    outer: Stack = ()
    """Mesh dims that have cut ``source``'s tensor dim outside of this one."""
    target_outer: Stack = ()
    """The same for ``target``'s."""


def plan_moves(
    source: Placements,
    target: Placements,
    mesh_shape: Sequence[int],
    shape: Sequence[int],
    *,
    is_recorded: bool = True,
) -> list[Move]:
    """The steps from ``source`` to ``target`` (both resolved, no RaggedShard) for a tensor of this global shape.

    ``is_recorded``: whether a gradient is. See [Note: reductions that do not commute].
    """
    start, goal = _without_idle(source, mesh_shape), _without_idle(target, mesh_shape)
    if start == goal:
        return []
    search = _Search(goal, tuple(mesh_shape), len(shape), _dims_of((start, goal)), is_recorded)
    moves, cost = search.path(start)
    over_all = _exchange_cost(start, goal, mesh_shape, shape)
    if over_all is not None and cost[1] > 1 and over_all < cost[0] * max(math.prod(shape), 1) * (1 - 1e-9):
        return [Move(-1, REPLICATE, REPLICATE, Step.EXCHANGE, start, goal)]
    return moves


def _without_idle(placements: Placements, mesh_shape: Sequence[int]) -> Placements:
    """Mesh dims of one rank do nothing."""
    return tuple(REPLICATE if n == 1 else p for p, n in zip(placements, mesh_shape, strict=True))


def _dims_of(states: Sequence[Placements]) -> tuple[int, ...]:
    return tuple(sorted({p.dim for state in states for p in state if isinstance(p, Shard)}))


Cost = tuple[float, int, int]
"""Elements (as a share of the whole), launches, steps."""


@dataclass(frozen=True)
class _Search:
    goal: Placements
    mesh_shape: tuple[int, ...]
    ndim: int
    dims: tuple[int, ...]
    """Tensor dims that may be cut on the way."""
    is_recorded: bool

    def path(self, start: Placements) -> tuple[list[Move], Cost]:
        count = itertools.count()
        best: dict[Placements, Cost] = {start: (0.0, 0, 0)}
        came: dict[Placements, Move] = {}
        heap: list[tuple[Cost, int, Placements]] = [((0.0, 0, 0), next(count), start)]
        done: set[Placements] = set()
        while heap:
            cost, _, at = heapq.heappop(heap)
            if at in done:
                continue
            if at == self.goal:
                break
            done.add(at)
            for move, elements in self.steps(at):
                new = (
                    round(cost[0] + elements, 12),
                    cost[1] + (move.step in _LAUNCHES),
                    cost[2] + 1,
                )
                if move.after not in best or new < best[move.after]:
                    best[move.after] = new
                    came[move.after] = move
                    heapq.heappush(heap, (new, next(count), move.after))
        moves: list[Move] = []
        state = self.goal
        while state != start:
            moves.append(came[state])
            state = came[state].before
        return moves[::-1], best[self.goal]

    def steps(self, at: Placements) -> Iterator[tuple[Move, float]]:
        """What can be done next, and the elements that each moves."""
        stacks = stacks_of(at, self.mesh_shape, self.ndim)
        held = 1 / math.prod(self.mesh_shape[i] for stack in stacks for i in stack)
        for i, now in enumerate(at):
            num_ranks, wanted = self.mesh_shape[i], self.goal[i]
            if num_ranks == 1:
                continue
            share = held * (num_ranks - 1) / num_ranks
            if isinstance(now, Shard):
                stack = stacks[now.dim]
                if stack[-1] != i:
                    continue
                yield self._move(at, i, REPLICATE, Step.ALL_GATHER, stack[:-1]), held * (num_ranks - 1)
                yield from self._cuts(at, stacks, i, Step.ALL_TO_ALL, share, stack[:-1], now.dim)
                if isinstance(wanted, Partial) and wanted.is_linear and self._is_free(at, i, wanted):
                    yield self._move(at, i, wanted, Step.TO_PARTIAL, stack[:-1]), 0.0
            elif isinstance(now, Partial):
                if not (self._is_free(at, i, now) and self._is_next(at, i, now)):
                    continue
                yield self._move(at, i, REPLICATE, Step.ALL_REDUCE), 2 * share
                yield from self._cuts(at, stacks, i, Step.REDUCE_SCATTER, share)
                if isinstance(wanted, Partial) and wanted != now and wanted.is_linear and now.is_linear:
                    yield self._move(at, i, wanted, Step.SCALE), 0.0
            else:
                yield from self._cuts(at, stacks, i, Step.SLICE, 0.0)
                if isinstance(wanted, Partial) and self._is_free(at, i, wanted):
                    yield self._move(at, i, wanted, Step.TO_PARTIAL), 0.0

    def _cuts(
        self,
        at: Placements,
        stacks: Sequence[Stack],
        i: int,
        step: Step,
        elements: float,
        outer: Stack = (),
        own: int | None = None,
    ) -> Iterator[tuple[Move, float]]:
        for dim in self.dims:
            if dim != own:
                to = shard_in((*stacks[dim], i), i, dim, self.mesh_shape)
                yield self._move(at, i, to, step, outer, stacks[dim]), elements

    def _move(
        self, at: Placements, i: int, to: Placement, step: Step, outer: Stack = (), target_outer: Stack = ()
    ) -> Move:
        return Move(i, at[i], to, step, at, (*at[:i], to, *at[i + 1 :]), outer, target_outer)

    def _is_free(self, at: Placements, i: int, kind: Partial) -> bool:
        """See [Note: reductions that do not commute]."""
        inner = [at[j] for j in range(i + 1, len(at))]
        return not any(isinstance(p, Partial) and _commuting(p) != _commuting(kind) for p in inner)

    def _is_next(self, at: Placements, i: int, kind: Partial) -> bool:
        """Ties of extremes share their gradient step by step, so that the order of the steps counts: the rightmost first."""
        return not self.is_recorded or kind.reduce_op not in ("max", "min") or kind not in at[i + 1 :]


_LAUNCHES = frozenset({Step.ALL_GATHER, Step.ALL_TO_ALL, Step.REDUCE_SCATTER, Step.ALL_REDUCE})


def _commuting(kind: Partial) -> str:
    """Reductions with the same answer commute with each other."""
    return "linear" if kind.is_linear else {"all": "min", "any": "max"}.get(kind.reduce_op, kind.reduce_op)


def _exchange_cost(
    start: Placements, goal: Placements, mesh_shape: Sequence[int], shape: Sequence[int]
) -> int | None:
    """The most elements that a rank gets if everyone asks for what it lacks; None if that does not lead from start to goal."""
    if any(a != b and (a.is_partial() or b.is_partial()) for a, b in zip(start, goal, strict=True)):
        return None
    from hp_dtensor.cuts import block_of

    stacks = [stacks_of(state, mesh_shape, len(shape)) for state in (start, goal)]
    most = 0
    for coordinate in itertools.product(*map(range, mesh_shape)):
        (had, had_at), (wants, wants_at) = (block_of(shape, s, mesh_shape, coordinate) for s in stacks)
        common = math.prod(
            max(0, min(a + n, b + m) - max(a, b))
            for a, n, b, m in zip(had_at, had, wants_at, wants, strict=True)
        )
        most = max(most, math.prod(wants) - common)
    return most
