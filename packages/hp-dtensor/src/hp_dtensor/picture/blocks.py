"""The blocks of a tensor and their holders, sorted for drawing: panels of rows and columns.

Cuts of one tensor dim do not depend on those of another, so the blocks are a grid. Two dims are drawn as rows and columns;
where more are cut, there is a panel for every block along the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.placements import Partial, Placement
from hp_dtensor.spec import local_block

Span = tuple[int, int]
"""First index and the one after the last."""


@dataclass(frozen=True)
class Held:
    """One block and who holds it."""

    spans: tuple[Span, ...]
    """One per tensor dim."""
    copies: tuple[tuple[int, ...], ...]
    """One entry per copy of the block: the global rank that has it, or all the ranks whose values make it up."""

    @property
    def label(self) -> str:
        """``0, 1`` for two copies; ``0 + 1`` for two parts of one; ``(0 + 1), (2 + 3)`` for two copies in two parts."""
        parts = [" + ".join(map(str, ranks)) for ranks in self.copies]
        several = len(parts) > 1
        return ", ".join(f"({part})" if several and " " in part else part for part in parts)


@dataclass(frozen=True)
class Panel:
    """A drawing of rows and columns at fixed blocks along all other dims."""

    title: str
    rows: tuple[Span, ...]
    columns: tuple[Span, ...]
    cells: dict[tuple[Span, Span], Held]


@dataclass(frozen=True)
class Picture:
    """Everything that a drawing shows."""

    title: str
    row_dim: int | None
    """Tensor dim that is drawn downwards; None: there is none."""
    column_dim: int | None
    panels: tuple[Panel, ...]
    idle: tuple[int, ...]
    """Ranks that hold no element."""


def picture_of(mesh: Any, placements: Sequence[Placement], shape: tuple[int, ...], title: str) -> Picture:
    """The blocks of a tensor of a global shape on a mesh. Arithmetic only: any rank, also one outside of the mesh, may ask."""
    held, idle = _held(mesh, placements, shape)
    row_dim, column_dim = _drawn_dims(held, len(shape))

    def span(block: Held, dim: int | None) -> Span:
        return (0, 1) if dim is None else block.spans[dim]

    others = [d for d in range(len(shape)) if d not in (row_dim, column_dim)]
    panels = []
    for at in sorted({tuple(block.spans[d] for d in others) for block in held}):
        inside = [block for block in held if tuple(block.spans[d] for d in others) == at]
        fixed = (f"dim {d}: {a}:{b}" for d, (a, b) in zip(others, at, strict=True) if _is_cut(held, d))
        panels.append(
            Panel(
                ", ".join(fixed),
                tuple(sorted({span(block, row_dim) for block in inside})),
                tuple(sorted({span(block, column_dim) for block in inside})),
                {(span(block, row_dim), span(block, column_dim)): block for block in inside},
            )
        )
    return Picture(title, row_dim, column_dim, tuple(panels), idle)


def _held(
    mesh: Any, placements: Sequence[Placement], shape: tuple[int, ...]
) -> tuple[list[Held], tuple[int, ...]]:
    """Every block that has elements, with its holders; and the ranks that hold none."""
    holders: dict[tuple[Span, ...], dict[tuple[int, ...], list[int]]] = {}
    idle = []
    for rank, coordinate in zip(mesh.rank_list, _coordinates(mesh.shape), strict=True):
        sizes, offsets = local_block(shape, placements, mesh.shape, coordinate)
        if 0 in sizes:
            idle.append(rank)
            continue
        spans = tuple((offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        # Ranks that differ along summed mesh dims alone hold parts of the same copy.
        copy = tuple(c for c, p in zip(coordinate, placements, strict=True) if not isinstance(p, Partial))
        holders.setdefault(spans, {}).setdefault(copy, []).append(rank)
    return [Held(spans, tuple(map(tuple, by_copy.values()))) for spans, by_copy in holders.items()], tuple(
        idle
    )


def _coordinates(mesh_shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, mesh_shape))


def _is_cut(held: Sequence[Held], dim: int) -> bool:
    return len({block.spans[dim] for block in held}) > 1


def _drawn_dims(held: Sequence[Held], ndim: int) -> tuple[int | None, int | None]:
    """Rows and columns: the first two dims that are cut, filled up with the last ones; a vector lies in a row."""
    if ndim == 0:
        return None, None
    if ndim == 1:
        return None, 0
    cut = [d for d in range(ndim) if _is_cut(held, d)][:2]
    rest = [d for d in reversed(range(ndim)) if d not in cut]
    first, second = sorted([*cut, *rest][:2])
    return first, second
