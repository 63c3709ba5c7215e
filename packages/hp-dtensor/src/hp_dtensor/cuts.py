"""In which order the mesh dims cut each tensor dim, and where that leaves the pieces.

[Note: cut order] The placements of a tensor say, for each tensor dim, which mesh dims cut it, and in which order: a stack of
mesh dims from the outermost cut to the innermost one. A plain Shard cuts outside of all mesh dims further right; a
StridedShard cuts inside of the outermost of them, whose sizes multiply to its ``split_factor``. So every order has exactly
one notation: reading the mesh dims from right to left, each is put into the stack of its tensor dim behind the cuts that
``split_factor`` counts. Each cut follows the chunk rule on what the outer ones have left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hp_dtensor.chunk import chunk_offset, chunk_size
from hp_dtensor.placements import Placement, RaggedShard, Shard, StridedShard

Stack = tuple[int, ...]
"""Mesh dims that cut one tensor dim, outermost first."""


def stacks_of(placements: Sequence[Placement], mesh_shape: Sequence[int], ndim: int) -> tuple[Stack, ...]:
    """The stack of every tensor dim. ValueError for a ``split_factor`` that no outer cuts make."""
    stacks: list[Stack] = [()] * ndim
    for mesh_dim in reversed(range(len(placements))):
        placement = placements[mesh_dim]
        if isinstance(placement, Shard):
            stack = stacks[placement.dim]
            at = _depth(placement, mesh_dim, stack, mesh_shape) if isinstance(placement, StridedShard) else 0
            stacks[placement.dim] = (*stack[:at], mesh_dim, *stack[at:])
    return tuple(stacks)


def _depth(placement: StridedShard, mesh_dim: int, stack: Stack, mesh_shape: Sequence[int]) -> int:
    """How many outer cuts the placement counts."""
    factors = [math.prod(mesh_shape[i] for i in stack[:depth]) for depth in range(len(stack) + 1)]
    if placement.split_factor not in factors:
        raise ValueError(
            f"{placement} along mesh dim {mesh_dim} does not fit: mesh dims further right cut tensor dim {placement.dim} "
            f"into {' or '.join(map(str, sorted(set(factors))))} chunks before; give one of these as split_factor"
        )
    return factors.index(placement.split_factor)


def shard_in(stack: Stack, mesh_dim: int, dim: int, mesh_shape: Sequence[int]) -> Shard:
    """The placement of ``mesh_dim``, which stands in this stack of tensor dim ``dim``."""
    before = stack[: stack.index(mesh_dim)]
    factor = math.prod(mesh_shape[i] for i in before if i > mesh_dim)
    return Shard(dim) if factor == 1 else StridedShard(dim, factor)


def with_stacks(
    placements: Sequence[Placement], stacks: Sequence[Stack], mesh_shape: Sequence[int]
) -> tuple[Placement, ...]:
    """The placements whose cuts are these stacks; those of mesh dims that cut nothing stay."""
    result = list(placements)
    for dim, stack in enumerate(stacks):
        for mesh_dim in stack:
            result[mesh_dim] = shard_in(stack, mesh_dim, dim, mesh_shape)
    return tuple(result)


def local_block(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and offset of the piece at ``coordinate``, by [Note: cut order].

    ValueError for a RaggedShard: its piece is a run of elements and no block; see :mod:`hp_dtensor.ragged`.
    """
    ragged = next((p for p in placements if isinstance(p, RaggedShard)), None)
    if ragged is not None:
        raise ValueError(
            f"the piece of {ragged} is a run of elements, not a block: redistribute the tensor first"
        )
    return block_of(shape, stacks_of(placements, mesh_shape, len(shape)), mesh_shape, coordinate)


def block_of(
    shape: Sequence[int], stacks: Sequence[Stack], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """:func:`local_block` of cuts that are given as stacks."""
    sizes, offsets = list(shape), [0] * len(shape)
    for dim, stack in enumerate(stacks):
        for mesh_dim in stack:
            offsets[dim] = offsets[dim] + chunk_offset(sizes[dim], mesh_shape[mesh_dim], coordinate[mesh_dim])
            sizes[dim] = chunk_size(sizes[dim], mesh_shape[mesh_dim], coordinate[mesh_dim])
    return tuple(sizes), tuple(offsets)


def left_for(
    shape: Sequence[int], dim: int, outer: Stack, mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> int:
    """How many indices of ``dim`` the cuts ``outer`` leave at ``coordinate``."""
    size = shape[dim]
    for mesh_dim in outer:
        size = chunk_size(size, mesh_shape[mesh_dim], coordinate[mesh_dim])
    return size
