"""A redistribution as a value that can be read before it is run: its steps, and the bytes of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.across_meshes import blockwise, check_same_ranks
from hp_dtensor.cuts import left_for, stacks_of
from hp_dtensor.exchange import blocks_on, elements_sent
from hp_dtensor.layout import Layout, mesh_and_placements
from hp_dtensor.placements import REPLICATE, Placement, RaggedShard, Shard
from hp_dtensor.planning import Move, Step
from hp_dtensor.ragged import run_sizes
from hp_dtensor.redistributed import records
from hp_dtensor.redistribution import moves_between
from hp_dtensor.spec import Spec, make_spec, shown
from hp_platform import get_platform


@dataclass(frozen=True)
class PlannedStep:
    """One step of a plan."""

    kind: str
    """``slice``, ``all_gather``, ``all_to_all``, ``reduce_scatter``, ``all_reduce``, ``to partial``, ``scale``, ``exchange``."""
    mesh_dim: str
    """The name, or the number, of the mesh dim; ``all`` for an exchange."""
    num_ranks: int
    source: str
    target: str
    nbytes: int
    """What a rank sends at most, and so receives, in a ring; 0 for a local step."""


@dataclass(frozen=True)
class RedistributionPlan:
    """How a tensor comes from some placements to others. ``print`` it: a table with a line per step."""

    title: str
    steps: tuple[PlannedStep, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that a rank sends in all steps."""
        return sum(step.nbytes for step in self.steps)

    def __str__(self) -> str:
        rows = [
            (
                step.kind,
                step.mesh_dim,
                str(step.num_ranks),
                f"{step.source} -> {step.target}",
                f"{step.nbytes:,}",
            )
            for step in self.steps
        ]
        table = [
            ("step", "mesh dim", "ranks", "from -> to", "bytes per rank"),
            *rows,
            ("total", "", "", "", f"{self.nbytes:,}"),
        ]
        widths = [max(len(row[column]) for row in table) for column in range(5)]
        lines = [
            "  ".join(
                [
                    *(cell.ljust(n) for cell, n in zip(row[:4], widths[:4], strict=True)),
                    row[4].rjust(widths[4]),
                ]
            )
            for row in table
        ]
        return "\n".join([self.title, *lines])


def redistribute_plan(
    tensor: Any,
    device_mesh: Any = None,
    placements: Sequence[Any] | Layout | None = None,
    *,
    shape: Sequence[int] | None = None,
    dtype: Any = None,
) -> RedistributionPlan:
    """What ``tensor.redistribute(device_mesh, placements)`` will do, without doing it.

    Args:
        tensor: a DTensor; or a Layout, with ``shape`` and ``dtype`` of the tensor that it stands for (default float32).
        device_mesh, placements: as for ``redistribute``.

    Communication: none; any rank of the mesh may ask alone. Bytes are those of a ring: a rank sends ``(w - 1) / w`` of a
    gathered or scattered tensor over w ranks, twice as much for an all-reduce; of uneven pieces the largest count. Several
    maxima or minima may cost less where no gradient is recorded; of a Layout one is.
    ValueError for arguments that do not fit.
    """
    platform = get_platform()
    if isinstance(tensor, Layout):
        if shape is None:
            raise ValueError("redistribute_plan of a Layout needs shape=, the global shape of the tensor")
        spec = make_spec(tensor.mesh, tensor, shape)
        itemsize = platform.itemsize(platform.dtype("float32" if dtype is None else dtype))
        is_recorded = True
    else:
        spec, itemsize = tensor._spec, platform.itemsize(tensor._local.dtype)
        is_recorded = records(tensor._local)
    mesh, wanted = mesh_and_placements(device_mesh, placements)
    mesh = spec.mesh if mesh is None or mesh == spec.mesh else mesh
    if mesh is not spec.mesh:
        check_same_ranks(spec.mesh, mesh)
    target = make_spec(mesh, (REPLICATE,) * len(mesh.shape) if wanted is None else wanted, spec.shape)
    title = f"{shown(spec.placements)} -> {shown(target.placements)} of {spec.shape}, {itemsize} bytes per element"
    if mesh is spec.mesh:
        moves = moves_between(spec, target, is_recorded=is_recorded)
        steps = [_planned(spec, move, itemsize) for move in moves]
        return RedistributionPlan(title, tuple(steps))
    between = make_spec(spec.mesh, blockwise(spec.placements), spec.shape)
    landing = make_spec(mesh, blockwise(target.placements), spec.shape)
    steps = [
        *(_planned(spec, move, itemsize) for move in moves_between(spec, between)),
        _exchanged(between, landing, itemsize),
        *(_planned(landing, move, itemsize) for move in moves_between(landing, target)),
    ]
    return RedistributionPlan(f"{title}, to {mesh}", tuple(steps))


def _exchanged(source: Spec, target: Spec, itemsize: int) -> PlannedStep:
    ends = [blocks_on(spec.mesh, spec.placements, spec.shape) for spec in (source, target)]
    ranks = {*source.mesh.rank_list, *target.mesh.rank_list}
    return PlannedStep(
        Step.EXCHANGE.value,
        "all",
        len(ranks),
        shown(source.placements),
        shown(target.placements),
        elements_sent(*ends) * itemsize,
    )


def _planned(spec: Spec, move: Move, itemsize: int) -> PlannedStep:
    mesh = spec.mesh
    if move.step is Step.EXCHANGE:
        before, after = (make_spec(mesh, at, spec.shape) for at in (move.before, move.after))
        return _exchanged(before, after, itemsize)
    names, num_ranks = mesh.mesh_dim_names, mesh.shape[move.mesh_dim]
    name = str(move.mesh_dim) if names is None else names[move.mesh_dim]
    elements = elements_of_move(spec, move, num_ranks)
    kind = move.step.value
    return PlannedStep(
        kind, name, num_ranks, repr(move.source), repr(move.target), math.ceil(elements * itemsize)
    )


def elements_of_move(spec: Spec, move: Move, num_ranks: int) -> float:
    """What the rank with the largest pieces sends: the first one."""
    share = (num_ranks - 1) / num_ranks
    if move.step is Step.ALL_GATHER:
        return share * _held(spec, move.after)
    if move.step in (Step.ALL_TO_ALL, Step.REDUCE_SCATTER):
        return share * _held(spec, move.before)
    return 2 * share * _held(spec, move.before) if move.step is Step.ALL_REDUCE else 0.0


def _held(spec: Spec, placements: Sequence[Placement]) -> int:
    ragged = next((p for p in placements if isinstance(p, RaggedShard)), None)
    if ragged is not None:
        return max(run_sizes(ragged, spec.shape))
    mesh_shape = spec.mesh.shape
    plain = [p if isinstance(p, Shard) else REPLICATE for p in placements]
    stacks = stacks_of(plain, mesh_shape, len(spec.shape))
    first = (0,) * len(mesh_shape)
    return math.prod(left_for(spec.shape, dim, stack, mesh_shape, first) for dim, stack in enumerate(stacks))
