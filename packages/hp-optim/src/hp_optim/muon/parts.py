"""Who holds what of a matrix: the parts of a sharded tensor that lie in a box, by rank. Arithmetic only.

A :class:`Box` is a block of the whole tensor. What a rank holds of a tensor is one box, or, of a RaggedShard, a run of its
flat order, which is a few boxes. What it holds of a matrix (a box, too) is what both have in common.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from hp_dtensor.cuts import block_of
from hp_dtensor.placements import RaggedShard
from hp_dtensor.ragged import ragged_dim, run_sizes
from hp_dtensor.spec import VIRTUAL_DIM, Spec, remember


class Box(NamedTuple):
    """A block of a tensor."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def common(self, other: Box) -> Box | None:
        """What both hold; None if that is nothing."""
        offset = tuple(map(max, self.offset, other.offset))
        size = tuple(
            min(a + n, b + m) - start
            for a, n, b, m, start in zip(
                self.offset, self.size, other.offset, other.size, offset, strict=True
            )
        )
        return Box(offset, size) if all(n > 0 for n in size) else None

    def inside(self, outer: Box) -> Box:
        """This box as it lies in ``outer``, whose corner is the origin then."""
        return Box(tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True)), self.size)


class Held(NamedTuple):
    """A box in a rank's local tensor: the whole of it, or (a part of a run) what begins at element ``start`` of it."""

    box: Box
    start: int | None = None


class Piece(NamedTuple):
    """A box of the whole tensor, and the larger one that the rank holds and it is cut from."""

    box: Box
    held: Held


@dataclass(frozen=True, eq=False)
class Sharing:
    """Who holds what of one matrix."""

    pieces: Mapping[int, tuple[Piece, ...]]
    """By global rank, in ascending order; ranks that hold nothing of it are absent. One rank (any number) if it is not shared."""
    replica: Mapping[int, tuple[int, ...]]
    """Of these ranks the coordinates along the mesh dims that replicate: ranks with equal ones hold the matrix once together."""

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """Ranks that hold some of it."""
        return tuple(self.pieces)

    @cached_property
    def held(self) -> Mapping[int, int]:
        """How many elements each holder has."""
        return {rank: sum(piece.box.volume for piece in found) for rank, found in self.pieces.items()}

    def senders(self, owner: int) -> tuple[int, ...]:
        """The holders that the whole matrix comes from, if ``owner`` (a holder) wants it: those of its own replica."""
        return tuple(rank for rank in self.pieces if self.replica[rank] == self.replica[owner])


def alone(box: Box, shape: Sequence[int], rank: int) -> Sharing:
    """Of a tensor that every rank has for itself."""
    whole = Held(Box((0,) * len(shape), tuple(shape)))
    return Sharing({rank: (Piece(box, whole),)}, {rank: ()})


def sharing_of(spec: Spec, box: Box) -> Sharing:
    """Of a DTensor; worked out once for each spec and box."""
    key = ("who holds what", spec, box)
    found: Sharing | None = spec.plans.get(key)
    if found is None:
        found = _sharing(spec, box)
        remember(spec.plans, key, found)
    return found


def _sharing(spec: Spec, box: Box) -> Sharing:
    replicates = [dim for dim, placement in enumerate(spec.placements) if placement.is_replicate()]
    pieces, replica = {}, {}
    for rank, (coordinate, held) in sorted(_held_on(spec).items()):
        cut = [(box.common(each.box), each) for each in held]
        found = tuple(Piece(common, each) for common, each in cut if common is not None)
        if found:
            pieces[rank] = found
            replica[rank] = tuple(coordinate[dim] for dim in replicates)
    return Sharing(pieces, replica)


def held_by_ranks(spec: Spec) -> dict[int, tuple[Held, ...]]:
    """By global rank what it holds of the tensor."""
    return {rank: held for rank, (_, held) in _held_on(spec).items()}


def _held_on(spec: Spec) -> Mapping[int, tuple[tuple[int, ...], tuple[Held, ...]]]:
    """For each rank of the mesh its coordinate and what it holds; once for each spec."""
    key = ("what each rank holds", spec)
    found = spec.plans.get(key)
    if found is None:
        found = {rank: (at, _held(spec, at)) for rank, at in _coordinates(spec.mesh).items()}
        remember(spec.plans, key, found)
    return found


def _coordinates(mesh: Any) -> dict[int, tuple[int, ...]]:
    names = getattr(mesh, "mesh_dim_names", None)
    sizes = list(mesh.shape)
    if names and names[-1] == VIRTUAL_DIM:
        sizes[-1] = 1
    return dict(zip(mesh.rank_list, itertools.product(*map(range, sizes)), strict=True))


def _held(spec: Spec, coordinate: tuple[int, ...]) -> tuple[Held, ...]:
    at = ragged_dim(spec.placements)
    if at is None:
        size, offset = block_of(spec.shape, spec.cuts, spec.mesh.shape, coordinate)
        return (Held(Box(offset, size)),)
    placement = spec.placements[at]
    assert isinstance(placement, RaggedShard)
    sizes = run_sizes(placement, spec.shape)
    mine = coordinate[at]
    found, start = [], 0
    for box in run_boxes(spec.shape, sum(sizes[:mine]), sizes[mine]):
        found.append(Held(box, start))
        start = start + box.volume
    return tuple(found)


def run_boxes(shape: Sequence[int], start: int, length: int) -> list[Box]:
    """The boxes that elements ``start`` to ``start + length`` of the flat order make up, in that order."""
    if length == 0:
        return []
    if len(shape) <= 1:
        return [Box((start,), (length,)) if shape else Box((), ())]
    row, end = math.prod(shape[1:]), start + length
    first = min(end, -(-start // row) * row)
    found = _in_row(shape, start, first)
    whole = (end - first) // row
    if whole:
        found.append(Box((first // row, *(0,) * (len(shape) - 1)), (whole, *shape[1:])))
    return found + _in_row(shape, first + whole * row, end)


def _in_row(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Of elements that lie in one index of the first dim."""
    index, inner = divmod(start, math.prod(shape[1:]))
    boxes = run_boxes(shape[1:], inner, end - start)
    return [Box((index, *box.offset), (1, *box.size)) for box in boxes]
