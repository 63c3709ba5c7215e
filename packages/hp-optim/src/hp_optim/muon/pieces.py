"""Boxes of tensors read, put in a row, and put together again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hp_optim.muon.parts import Box
from hp_optim.muon.routes import Cut
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import DType, Tensor


def part_of(platform: Platform, x: Tensor, box: Box) -> Tensor:
    """The box of ``x``, whose corner is the origin; ``x`` itself if it is all of it. A view where the framework can."""
    if box.size == tuple(x.shape):
        return x
    for dim, (start, length) in enumerate(zip(box.offset, box.size, strict=True)):
        if length != x.shape[dim]:
            x = platform.narrow(x, dim, start, length)
    return x


def piece_of(platform: Platform, local: Tensor, cut: Cut) -> Tensor:
    """The cut of a local tensor."""
    if cut.is_all:
        return local
    held = cut.held
    if held.start is not None:
        run = platform.narrow(local, 0, held.start, held.box.volume)
        local = platform.reshape(run, held.box.size)
    return part_of(platform, local, cut.box)


def in_a_row(platform: Platform, xs: Sequence[Tensor], dtype: DType, device: str) -> Tensor:
    """New memory ``(n,)`` of the dtype that holds the elements of each tensor (on ``device``), one after the other."""
    if not xs:
        return platform.empty((0,), dtype, device)
    if platform.supports("write_into_view", device):
        row = platform.empty((sum(math.prod(x.shape) for x in xs),), dtype, device)
        platform.foreach_copy_(cut_row(platform, row, [tuple(x.shape) for x in xs]), xs)
        return row
    rows = [platform.reshape(platform.contiguous(x), (-1,)) for x in xs]
    return platform.clone(platform.cast(platform.cat(rows), dtype))


def cut_row(platform: Platform, row: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """What :func:`in_a_row` has put there; views."""
    if not shapes:
        return []
    flat = platform.split(row, [math.prod(shape) for shape in shapes])
    return [platform.reshape(x, shape) for x, shape in zip(flat, shapes, strict=True)]


def joined(platform: Platform, pieces: Mapping[Box, Tensor], dim: int = 0) -> Tensor:
    """The tensor that the boxes make up without gaps: along ``dim`` those that begin together are joined first."""
    if len(pieces) == 1:
        return next(iter(pieces.values()))
    starts = sorted({box.offset[dim] for box in pieces})
    lines = [
        joined(platform, {box: x for box, x in pieces.items() if box.offset[dim] == start}, dim + 1)
        for start in starts
    ]
    return lines[0] if len(lines) == 1 else platform.cat(lines, dim)
