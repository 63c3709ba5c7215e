"""Panels: the slices of the moving dim that are communicated and multiplied one after the other.

[Note: slices] SUMMA broadcasts the blocks of the moving dim one by one. Here every rank contributes a slice of its own block
to every panel, so a panel is an all-gather (or reduce-scatter) over all ranks of a mesh dim instead of a broadcast from (or
reduction to) one. The bytes that a rank receives are the same, but all ranks send at the same time: an all-gather of n bytes
over w ranks takes (w - 1) / w of what a broadcast of n bytes takes. And the slices do not ask the two cuts of the moving dim
(into ``tp_r`` parts for the weight, ``tp_c`` for the activation) to coincide: index k belongs to panel
``(k // block) % num_panels``, wherever it lies, so any r x c, also uneven, has the same panels on both sides.
Source: van de Geijn and Watts, 1997, "SUMMA"; slices: Nam et al., ISCA 2025, "MeshSlice".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hp_dtensor.chunk import chunk_length, chunk_offset, chunk_size
from hp_dtensor.transport import Cut

Runs = tuple[tuple[int, int], ...]
"""Start and length of runs of consecutive indices, ascending, counted from the begin of this rank's block."""
ROWS, COLUMNS = 0, 1
"""Positions of the two mesh dims: tp_r, tp_c."""


@dataclass(frozen=True)
class Side:
    """One operand's part in a panel: which of its indices this rank holds, and how they are dealt over a mesh dim."""

    runs: Runs
    cut: Cut


@dataclass(frozen=True)
class Panel:
    """One slice of the moving dim."""

    activation: Side
    """Cut over tp_c."""
    weight: Side
    """Cut over tp_r."""


def panels_of(mesh: Any, size: int, num_panels: int) -> tuple[Panel, ...]:
    """The panels of a moving dim of ``size``, for this rank of the 2-D ``mesh``; those without an index are left out.

    Made once for a mesh, size and number. Makes the groups along both mesh dims: all ranks call.
    """
    groups = (mesh.get_group(ROWS), mesh.get_group(COLUMNS))
    key = ("hp_tp.panels", size, num_panels, *groups)
    found: tuple[Panel, ...] | None = mesh.interned.get(key)
    if found is None:
        found = mesh.interned.setdefault(key, _new_panels(mesh, groups, size, num_panels))
    return found


def _new_panels(mesh: Any, groups: tuple[Any, Any], size: int, num_panels: int) -> tuple[Panel, ...]:
    block = block_length(size, tuple(mesh.shape), num_panels)
    made = []
    for number in range(num_panels):
        sides = []
        for dim in (COLUMNS, ROWS):
            num_ranks, index = mesh.shape[dim], mesh.get_coordinate()[dim]
            of_ranks = [
                runs_of(size, num_ranks, rank, block, num_panels, number) for rank in range(num_ranks)
            ]
            sizes = tuple(sum(length for _, length in runs) for runs in of_ranks)
            cut = Cut(groups[dim], tuple(mesh.group_positions(dim)), index, 0, sizes)
            sides.append(Side(of_ranks[index], cut))
        if sum(sides[0].cut.sizes):
            made.append(Panel(*sides))
    return tuple(made)


_PERIODS = 8
"""At least so many turns through the panels go into a block where the cuts do not say another length: balance within 1/8."""


def block_length(size: int, mesh_shape: tuple[int, ...], num_panels: int) -> int:
    """Indices that follow each other in a panel.

    Where the cuts of both sides have a long common length, one turn through the panels is that long: then all ranks hold
    equally much of every panel, in one run if the mesh is square. Else blocks are short against what a rank holds, but not so
    short that a slice is copied index by index.
    """
    lengths = [max(1, chunk_length(size, num_ranks)) for num_ranks in mesh_shape]
    turn, shortest = math.gcd(*lengths), min(lengths)
    if turn * _PERIODS < shortest:
        turn = -(-shortest // _PERIODS)
    return -(-turn // num_panels)


def runs_of(size: int, num_ranks: int, rank: int, block: int, num_panels: int, number: int) -> Runs:
    """What a rank's chunk of ``size`` holds of panel ``number``."""
    start = chunk_offset(size, num_ranks, rank)
    end = start + chunk_size(size, num_ranks, rank)
    found: list[tuple[int, int]] = []
    for k in range(start // block, -(-end // block)):
        first, last = max(start, k * block), min(end, (k + 1) * block)
        if k % num_panels != number or first >= last:
            continue
        if found and sum(found[-1]) == first - start:  # one panel alone: its blocks touch
            found[-1] = (found[-1][0], found[-1][1] + last - first)
        else:
            found.append((first - start, last - first))
    return tuple(found)
