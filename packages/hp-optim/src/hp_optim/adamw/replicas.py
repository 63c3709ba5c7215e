"""State and work divided over replicas: every replica updates a piece, and all get all pieces.

[Note: divided replicas] A DTensor on a mesh of two or more dims that is Replicate along the first one (HSDP, or data parallel
beside tensor parallel) is held, with the same values and gradients, by all ranks along that dim. Each of them keeps the moments of
a piece of it and updates that piece only: dim 0 of the local tensor is cut by the chunk rule, so that state is a DTensor that is
sharded over both mesh dims, and a checkpoint of it fits any other number of ranks. Then the pieces are gathered in place: one
all-gather for all parameters of a group of ranks, a dtype and a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hp_dtensor import DTensor, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.chunk import chunk_length, chunk_offset, chunk_size
from hp_optim.pieces import local_of
from hp_platform import collectives
from hp_platform.collectives.unchecked import all_gather_into_each
from hp_platform.group import ProcessGroup
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor


class Division:
    """Which piece of a parameter this replica has."""

    def __init__(self, platform: Platform, parameter: Any, group: ProcessGroup) -> None:
        self.platform = platform
        self.group = group
        shape = tuple(parameter.to_local().shape)
        self.start = chunk_offset(shape[0], group.size, group.rank)
        self.length = chunk_size(shape[0], group.size, group.rank)
        self.longest = chunk_length(shape[0], group.size)
        cuts = [
            parameter.device_mesh.size(at)
            for at, placement in enumerate(parameter.placements)
            if isinstance(placement, Shard) and placement.dim == 0
        ]
        factor = math.prod(cuts)
        first = Shard(0) if factor == 1 else StridedShard(0, factor)
        self.placements = (first, *tuple(parameter.placements)[1:])
        """Of the state."""

    def piece(self, local: Tensor) -> Tensor:
        """A view of this replica's piece; may be empty."""
        return self.platform.narrow(local, 0, self.start, self.length)


def division_of(platform: Platform, parameter: Any) -> Division | None:
    """See [Note: divided replicas]; None for a parameter that is not divided."""
    if not isinstance(parameter, DTensor):
        return None
    placements, mesh = tuple(parameter.placements), parameter.device_mesh
    if (
        mesh.ndim < 2
        or not isinstance(placements[0], Replicate)
        or mesh.size(0) == 1
        or any(isinstance(placement, RaggedShard) for placement in placements)
        or not parameter.to_local().shape
    ):
        return None
    return Division(platform, parameter, mesh.get_group(0))


class Place:
    """Where a parameter's pieces come together."""

    __slots__ = ("_own", "_platform", "division", "fits", "is_padded", "kind", "numel", "padded", "target")

    def __init__(self, platform: Platform, target: Tensor, division: Division, *, rows: int) -> None:
        """``target``: the local tensor of ``rows`` rows, or all of its elements as a 1-D view of where they lie."""
        numel = math.prod(tuple(target.shape))
        behind = numel // rows if rows else 0
        device = platform.device_of(target)
        is_whole = platform.is_contiguous(target)
        self.division = division
        self.kind = (id(division.group), target.dtype, device)
        self.target = target
        self.numel = numel
        self.padded = division.longest * behind
        """Elements of every replica's piece on the way."""
        self._platform = platform
        self._own: Tensor | None = None
        """Part of the memory of a target that is contiguous."""
        if is_whole:
            flat = platform.reshape(target, (-1,))
            self._own = platform.narrow(flat, 0, division.start * behind, division.length * behind)
        self.is_padded = division.length < division.longest
        self.fits = (
            is_whole
            and self.padded * division.group.size == numel
            and platform.supports("write_into_view", device)
        )
        """Whether the result of a gather is the local tensor as it lies."""
        if self.fits:
            self.target = flat

    @property
    def own(self) -> Tensor:
        """This replica's piece, 1-D, as it is now; memory of the target, if that is contiguous."""
        if self._own is not None:
            return self._own
        return self._platform.reshape(self.division.piece(self.target), (-1,))


def place_of(platform: Platform, parameter: Any, division: Division) -> Place | None:
    """None for a parameter without elements here."""
    local = local_of(parameter)
    shape = tuple(local.shape)
    return Place(platform, local, division, rows=shape[0]) if math.prod(shape) else None


def gather_pieces(platform: Platform, places: Sequence[Place]) -> None:
    """Every replica's pieces into place, of parameters that all replicas have updated.

    Communication: per group of replicas, dtype and device one all-gather of the local tensors' bytes, each padded to a multiple of the
    number of replicas along dim 0. Memory: none beside them where a launch takes several tensors, for those without padding.
    """
    together: dict[Any, list[Place]] = {}
    for place in places:
        together.setdefault(place.kind, []).append(place)
    for (_, dtype, device), found in together.items():
        _gather(platform, found, dtype, device)


def _gather(platform: Platform, places: Sequence[Place], dtype: Any, device: str) -> None:
    def padded(place: Place) -> Tensor:
        padding = place.padded - place.own.shape[0]
        return platform.cat([place.own, platform.zeros((padding,), dtype, device)])

    group = places[0].division.group
    own = [padded(place) if place.is_padded else place.own for place in places]
    outs = None
    if platform.supports("write_into_view", device):
        outs = [
            place.target if place.fits else platform.empty((place.padded * group.size,), dtype, device)
            for place in places
        ]
    kind = device.partition(":")[0]
    found: Sequence[Tensor]
    if outs is not None and len(own) > 1 and platform.can_coalesce(kind) and platform.is_floating(dtype):
        found = outs  # contiguous, of one dtype and of sizes that were worked out above: nothing is left to be checked
        nbytes = sum(place.padded for place in places) * group.size * platform.itemsize(dtype)
        all_gather_into_each(outs, own, group, nbytes, False)
    else:
        found = collectives.all_gather_coalesced(own, group, outs=outs, async_op=False)
    rest = [(place, whole) for place, whole in zip(places, found, strict=True) if not place.fits]
    platform.foreach_copy_(
        [place.target for place, _ in rest],
        [
            platform.reshape(platform.narrow(whole, 0, 0, place.numel), tuple(place.target.shape))
            for place, whole in rest
        ],
    )
