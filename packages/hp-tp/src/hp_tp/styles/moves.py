"""The collectives at a module's door, with gradients; in compiled code as a part of the graph.

What each does, and what its backward does, stands in :mod:`hp_dtensor.conversions`. A compiled graph takes equal pieces, so that
it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor import conversions
from hp_dtensor.chunk import chunk_sizes
from hp_dtensor.conversions import Cut
from hp_platform import get_platform
from hp_platform.collectives import traced
from hp_platform.collectives.traced import TracedGroup
from hp_tp.styles.door import Door

Tensor = Any


def mark(x: Tensor, door: Door, used: Callable[[], None] | None = None) -> Tensor:
    """A whole tensor into a forward that differs between ranks. Backward: one all-reduce."""
    if get_platform().is_compiling():
        return traced.mark(x, _compiled(door))
    return conversions.mark(x, (door.mesh.get_group(0),), used)


def all_reduce(x: Tensor, door: Door) -> Tensor:
    """Summands to their sum. One all-reduce; backward: the identity."""
    if get_platform().is_compiling():
        return traced.all_reduce(x, _compiled(door))
    return conversions.all_reduce(x, door.mesh.get_group(0))


def gather(
    x: Tensor, door: Door, dim: int, shape: tuple[int, ...], used: Callable[[], None] | None = None
) -> Tensor:
    """Pieces along ``dim`` to the whole of ``shape``, for a forward that differs between ranks. One all-gather; backward: one
    reduce-scatter.
    """
    if get_platform().is_compiling():
        _check_even(door, dim, shape)
        return traced.gather_varying(x, dim, _compiled(door))
    return conversions.gather_varying(x, cut_along(door.mesh, dim, shape), None, used)


def reduce_scatter(x: Tensor, door: Door, dim: int, shape: tuple[int, ...]) -> Tensor:
    """Summands to this rank's piece of the sum. One reduce-scatter; backward: one all-gather."""
    if get_platform().is_compiling():
        _check_even(door, dim, shape)
        return traced.reduce_scatter(x, dim, _compiled(door))
    return conversions.reduce_scatter(x, cut_along(door.mesh, dim, shape))


def cut_along(mesh: Any, dim: int, shape: tuple[int, ...]) -> Cut:
    """How a dim is dealt to the ranks of a mesh of one dim."""
    group = mesh.get_group(0)
    key = ("tp cut", dim, shape[dim])
    known: Cut | None = mesh.interned.get(key)
    # The group may have been destroyed and made again.
    if known is None or known.group is not group:
        sizes = chunk_sizes(shape[dim], mesh.shape[0])
        known = Cut(group, mesh.group_positions(0), mesh.get_coordinate()[0], dim, sizes)
        mesh.interned[key] = known
    return known


def _compiled(door: Door) -> TracedGroup:
    if door.traced is None:
        raise RuntimeError(f"{door.what}: this platform compiles nothing, but says that it is compiling")
    return door.traced


def _check_even(door: Door, dim: int, shape: tuple[int, ...]) -> None:
    if shape[dim] % door.mesh.shape[0]:
        raise ValueError(
            f"{door.what}: dim {dim} of size {shape[dim]} does not divide over {door.mesh.shape[0]} ranks, and compiled code takes "
            f"equal pieces: leave this module uncompiled"
        )
