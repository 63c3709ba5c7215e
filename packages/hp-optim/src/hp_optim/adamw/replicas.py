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


def gather_pieces(platform: Platform, parameters: Sequence[tuple[Any, Division]]) -> None:
    """Every replica's pieces into place, for parameters that all replicas have updated.

    Communication: per group of replicas, dtype and device one all-gather of the local tensors' bytes, each padded to a multiple of the
    number of replicas along dim 0. Memory: none beside them where a launch takes several tensors, for those without padding.
    """
    together: dict[Any, list[tuple[Tensor, Division]]] = {}
    for parameter, division in parameters:
        local = local_of(parameter)
        if math.prod(tuple(local.shape)):
            key = (id(division.group), local.dtype, platform.device_of(local))
            together.setdefault(key, []).append((local, division))
    for (_, dtype, device), members in together.items():
        _gather(platform, members, dtype, device)


def _gather(platform: Platform, members: Sequence[tuple[Tensor, Division]], dtype: Any, device: str) -> None:
    in_place = platform.supports("write_into_view", device)
    own, outs = [], []
    for local, division in members:
        piece = platform.reshape(division.piece(local), (-1,))
        behind = math.prod(tuple(local.shape)[1:])
        numel = division.longest * behind
        is_even = local.shape[0] % division.group.size == 0
        if piece.shape[0] < numel:
            piece = platform.cat([piece, platform.zeros((numel - piece.shape[0],), dtype, device)])
        own.append(piece)
        fits = in_place and is_even and platform.is_contiguous(local)
        outs.append(
            platform.reshape(local, (-1,))
            if fits
            else platform.empty((numel * division.group.size,), dtype, device)
        )
    group = members[0][1].group
    found = collectives.all_gather_coalesced(own, group, outs=outs if in_place else None, async_op=False)
    targets, values = [], []
    for (local, _), whole, out in zip(members, found, outs, strict=True):
        is_there = in_place and platform.data_ptr(out) == platform.data_ptr(local)
        if not is_there:
            numel = math.prod(tuple(local.shape))
            targets.append(local)
            values.append(platform.reshape(platform.narrow(whole, 0, 0, numel), tuple(local.shape)))
    platform.foreach_copy_(targets, values)
