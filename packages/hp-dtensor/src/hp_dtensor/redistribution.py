"""From one spec to another on one mesh: the plan, made once, and its execution on this rank's piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor import conversions, reductions, transport
from hp_dtensor.chunk import chunk_sizes
from hp_dtensor.cuts import Stack, left_for
from hp_dtensor.exchange import Exchange, blocks_on, exchange
from hp_dtensor.placements import REPLICATE, Partial, Placement, RaggedShard, Shard
from hp_dtensor.planning import Move, Step, plan_moves
from hp_dtensor.ragged import ragged_dim, run_sizes
from hp_dtensor.spec import Spec, make_spec
from hp_dtensor.transport import Cut
from hp_platform import ProcessGroup, get_platform, group_of

Tensor = Any


def moves_between(source: Spec, target: Spec, *, is_recorded: bool = True) -> Sequence[Move]:
    """The plan from one spec to another of the same mesh and shape; the same on all ranks, made once.

    ``is_recorded``: whether a gradient is recorded, which some plans move more for.
    """
    key = ("moves", source, target, is_recorded)
    found = source.plans.get(key)
    if found is None:
        found = source.plans[key] = tuple(_planned(source, target, is_recorded))
    return found


def _planned(source: Spec, target: Spec, is_recorded: bool) -> list[Move]:
    """Runs of cells have no cut in common with blocks: the way from and to them leads over the whole."""
    if source is target:
        return []
    first, last = ragged_dim(source.placements), ragged_dim(target.placements)
    if first is None and last is None:
        ends = source.placements, target.placements
        return plan_moves(*ends, source.mesh.shape, source.shape, is_recorded=is_recorded)
    whole = (REPLICATE,) * len(source.placements)
    if first is not None and first == last:
        step = Step.ALL_TO_ALL if source.mesh.shape[first] > 1 else Step.SLICE
        return [_ragged_move(source.placements, target.placements, first, step)]
    moves: list[Move] = []
    at = source.placements
    if first is not None:
        at = whole
        moves.append(_ragged_move(source.placements, at, first, Step.ALL_GATHER))
    goal = target.placements
    if last is not None:
        # A sum along the ragged mesh dim is scattered in runs.
        own = at[last]
        goal = (*whole[:last], own if own.is_partial() else REPLICATE, *whole[last + 1 :])
    moves = [*moves, *plan_moves(at, goal, source.mesh.shape, source.shape, is_recorded=is_recorded)]
    if last is not None:
        step = Step.REDUCE_SCATTER if goal[last].is_partial() else Step.SLICE
        moves.append(_ragged_move(goal, target.placements, last, step))
    return moves


def _ragged_move(
    before: tuple[Placement, ...], after: tuple[Placement, ...], mesh_dim: int, step: Step
) -> Move:
    return Move(mesh_dim, before[mesh_dim], after[mesh_dim], step, before, after)


# --------------------------------------------------------------------------------------------------------------- execution
def run_moves(
    local: Tensor, spec: Spec, moves: Sequence[Move], varying: frozenset[int] = frozenset()
) -> Tensor:
    """Carry out a plan on this rank's piece of a tensor of ``spec``.

    ``varying``: mesh dims whose joined value goes into an operation that differs along them. Differentiable.
    Communication: what [Note: steps] in :mod:`hp_dtensor.planning` says for each step; none along mesh dims of size 1.
    """
    for move in moves:
        local = run_move(local, spec, move, move.mesh_dim in varying)
    return local


def run_move(
    local: Tensor, spec: Spec, move: Move, varying: bool = False, arrived: conversions.Arrived = None
) -> Tensor:
    """One step. ``arrived``: the result of its collective, if :func:`start_move` has started it before."""
    source, target = move.source, move.target
    if isinstance(source, RaggedShard) or isinstance(target, RaggedShard):
        return _run_ragged(local, spec, move, arrived)
    if move.step is Step.EXCHANGE:
        ends = (blocks_on(spec.mesh, at, spec.shape) for at in (move.before, move.after))
        return exchange(local, Exchange(group_of(spec.mesh.rank_list), *ends))
    if spec.mesh.shape[move.mesh_dim] == 1:
        return local
    group = spec.mesh.get_group(move.mesh_dim)
    if move.step is Step.ALL_GATHER:
        cut = source_cut(spec, move, group)
        if varying:
            return conversions.gather_varying(local, cut, arrived)
        return conversions.gather(local, cut, arrived)
    if move.step is Step.SLICE:
        return conversions.slice_out(local, _target_cut(spec, move, group))
    if move.step is Step.ALL_TO_ALL:
        cuts = source_cut(spec, move, group), _target_cut(spec, move, group)
        return conversions.all_to_all(local, *cuts, arrived)
    if move.step is Step.TO_PARTIAL:
        return _to_partial(local, spec, move)
    assert isinstance(source, Partial)
    local, op = _as_sum(local, source, group.size)
    if move.step is Step.SCALE:
        return local if target.is_partial("sum") else _scaled(local, group.size)
    if move.step is Step.REDUCE_SCATTER:
        cut = _target_cut(spec, move, group)
        if op == "sum":
            return conversions.reduce_scatter(local, cut, arrived)
        return reductions.reduce_scatter(local, cut, op, arrived)
    if op == "sum":
        return conversions.all_reduce(local, group, arrived)
    return reductions.all_reduce(local, group, op, arrived)


def _as_sum(local: Tensor, kind: Partial, num_ranks: int) -> tuple[Tensor, str]:
    """An average is the sum of scaled values."""
    reductions.check_reducible(local, kind.reduce_op)
    return (local / num_ranks, "sum") if kind.is_partial("avg") else (local, kind.reduce_op)


def _scaled(local: Tensor, num_ranks: int) -> Tensor:
    reductions.check_reducible(local, "avg")
    return local * num_ranks


def _to_partial(local: Tensor, spec: Spec, move: Move) -> Tensor:
    """From the value, or a chunk of it, to what is reduced to it."""
    group, kind = spec.mesh.get_group(move.mesh_dim), move.target
    is_first = spec.mesh.get_coordinate()[move.mesh_dim] == 0
    assert isinstance(kind, Partial)
    reductions.check_reducible(local, kind.reduce_op)
    if isinstance(move.source, Shard):
        local = conversions.pad(local, source_cut(spec, move))
    elif not kind.is_linear:
        return reductions.to_partial(local, group, kind.reduce_op, is_first)
    else:
        local = conversions.keep_on(local, is_first)
    return _scaled(local, group.size) if kind.is_partial("avg") else local


def _run_ragged(local: Tensor, spec: Spec, move: Move, arrived: conversions.Arrived) -> Tensor:
    """A step from or to runs of cells, on flat tensors."""
    platform = get_platform()
    if spec.mesh.shape[move.mesh_dim] == 1:
        return platform.reshape(local, spec.shape if move.target.is_replicate() else (-1,))
    if move.step is Step.ALL_TO_ALL:
        ends = (_runs(spec, placement, move.mesh_dim) for placement in (move.source, move.target))
        return exchange(local, Exchange(spec.mesh.get_group(move.mesh_dim), *ends))
    if isinstance(move.source, RaggedShard):
        cut = _run_cut(spec, move.source, move.mesh_dim)
        return platform.reshape(conversions.gather(local, cut, arrived), spec.shape)
    assert isinstance(move.target, RaggedShard)
    cut, flat = _run_cut(spec, move.target, move.mesh_dim), platform.reshape(local, (-1,))
    if not isinstance(move.source, Partial):
        return conversions.slice_out(flat, cut)
    flat, op = _as_sum(flat, move.source, spec.mesh.shape[move.mesh_dim])
    if op == "sum":
        return conversions.reduce_scatter(flat, cut, arrived)
    return reductions.reduce_scatter(flat, cut, op, arrived)


def _run_cut(spec: Spec, placement: RaggedShard, mesh_dim: int) -> Cut:
    mesh, sizes = spec.mesh, run_sizes(placement, spec.shape)
    index = mesh.get_coordinate()[mesh_dim]
    return Cut(mesh.get_group(mesh_dim), mesh.group_positions(mesh_dim), index, 0, sizes)


def _runs(spec: Spec, placement: Placement, mesh_dim: int) -> Any:
    from hp_dtensor.exchange import Block

    assert isinstance(placement, RaggedShard)
    group, sizes = spec.mesh.get_group(mesh_dim), run_sizes(placement, spec.shape)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return {
        group.ranks[position]: Block((starts[index],), (sizes[index],))
        for index, position in enumerate(spec.mesh.group_positions(mesh_dim))
    }


def source_cut(spec: Spec, move: Move, group: ProcessGroup | None = None) -> Cut:
    """How the tensor dim that a step joins is dealt. ``group``: that of the mesh dim, if it is at hand."""
    assert isinstance(move.source, Shard)
    return _cut(spec, move.mesh_dim, move.source.dim, move.outer, group)


def _target_cut(spec: Spec, move: Move, group: ProcessGroup | None = None) -> Cut:
    assert isinstance(move.target, Shard)
    return _cut(spec, move.mesh_dim, move.target.dim, move.target_outer, group)


def _cut(spec: Spec, mesh_dim: int, dim: int, outer: Stack, group: ProcessGroup | None) -> Cut:
    """How ``dim`` is dealt along a mesh dim: what the outer cuts have left of it, in chunks."""
    mesh, key = spec.mesh, ("cut", spec, mesh_dim, dim, outer)
    if group is None:
        group = mesh.get_group(mesh_dim)
    known: Cut | None = spec.plans.get(key)
    # The group may have been destroyed and made again.
    if known is None or known.group is not group:
        coordinate = mesh.get_coordinate()
        left = left_for(spec.shape, dim, outer, mesh.shape, coordinate)
        sizes = chunk_sizes(left, mesh.shape[mesh_dim])
        known = Cut(group, mesh.group_positions(mesh_dim), coordinate[mesh_dim], dim, sizes)
        spec.plans[key] = known
    return known


# ------------------------------------------------------------------------------------------------------------ asynchronous
def start_move(local: Tensor, spec: Spec, move: Move) -> transport.Pending | None:
    """Start the collective of a step; None if it has none that can be waited for later."""
    ragged = isinstance(move.source, RaggedShard) or isinstance(move.target, RaggedShard)
    if ragged or move.mesh_dim < 0 or spec.mesh.shape[move.mesh_dim] == 1:
        return None
    if move.step is Step.ALL_GATHER:
        return transport.gather(local, source_cut(spec, move), async_op=True)
    if move.step is Step.ALL_TO_ALL:
        cuts = source_cut(spec, move), _target_cut(spec, move)
        return transport.all_to_all(local, *cuts, async_op=True)
    if move.step not in (Step.ALL_REDUCE, Step.REDUCE_SCATTER):
        return None
    assert isinstance(move.source, Partial)
    group = spec.mesh.get_group(move.mesh_dim)
    values, kind = _as_sum(local, move.source, group.size)
    op = reductions.COLLECTIVE_OF.get(kind, kind)
    if move.step is Step.ALL_REDUCE:
        return transport.all_reduce(values, group, op, async_op=True)
    return transport.reduce_scatter(values, _target_cut(spec, move), op, async_op=True)


def spec_after(spec: Spec, placements: Sequence[Placement]) -> Spec:
    """The spec of the same tensor in other placements."""
    return make_spec(spec.mesh, placements, spec.shape)


def joined_last(moves: Sequence[Move]) -> frozenset[int]:
    """The mesh dims that a plan leaves Replicate by an all-gather, whose backward may sum (see ``varying``)."""
    last = {move.mesh_dim: move for move in moves}
    if -1 in last:
        return frozenset()
    return frozenset(
        i
        for i, move in last.items()
        if move.step is Step.ALL_GATHER and not isinstance(move.source, RaggedShard)
    )
