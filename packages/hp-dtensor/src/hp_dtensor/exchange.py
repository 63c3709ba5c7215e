"""Every rank gets the block that it wants from ranks that hold it: one all-to-all over all of them.

What the steps along single mesh dims cannot do directly: another cut order, another mesh, other ranks. A block is known by
its offset and size along every dim; a rank that holds or wants nothing has none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from hp_dtensor.cuts import block_of, stacks_of
from hp_dtensor.placements import Placement
from hp_platform import ProcessGroup, collectives, get_platform
from hp_platform.on_platform import once

Tensor = Any


class Block(NamedTuple):
    """A part of a tensor."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def part(self, x: Tensor, of: Block) -> Tensor:
        """This block of the tensor ``x``, which is the block ``of``."""
        platform = get_platform()
        for dim, (start, size, base) in enumerate(zip(self.offset, self.size, of.offset, strict=True)):
            x = platform.narrow(x, dim, start - base, size)
        return x


Blocks = Mapping[int, Block]
"""By global rank."""


def blocks_on(mesh: Any, placements: Sequence[Placement], shape: Sequence[int]) -> dict[int, Block]:
    """The block of every rank of a mesh; Partial counts as the whole."""
    stacks = stacks_of(placements, mesh.shape, len(shape))
    coordinates = itertools.product(*map(range, mesh.shape))
    found = {}
    for rank, coordinate in zip(mesh.rank_list, coordinates, strict=True):
        size, offset = block_of(shape, stacks, mesh.shape, coordinate)
        found[rank] = Block(offset, size)
    return found


class Parcel(NamedTuple):
    """A block that one rank sends to another."""

    sender: int
    receiver: int
    block: Block


@dataclass(frozen=True, eq=False)
class Exchange:
    """Who holds what before and after."""

    group: ProcessGroup
    source: Blocks
    target: Blocks

    def reversed(self) -> Exchange:
        """The way back: what gradients take."""
        return Exchange(self.group, self.target, self.source)

    def parcels(self) -> list[Parcel]:
        """What travels, also from a rank to itself; the same on all ranks. Copies are asked in turn."""
        return parcels_between(self.source, self.target)


def parcels_between(source: Blocks, target: Blocks) -> list[Parcel]:
    """See :meth:`Exchange.parcels`."""
    holders: dict[Block, list[int]] = {}
    for rank, block in source.items():
        if block.volume:
            holders.setdefault(block, []).append(rank)
    parcels = []
    for turn, (receiver, wanted) in enumerate(target.items()):
        for block, ranks in holders.items():
            common = _common(block, wanted)
            if common is not None:
                sender = receiver if receiver in ranks else ranks[turn % len(ranks)]
                parcels.append(Parcel(sender, receiver, common))
    return parcels


def elements_sent(source: Blocks, target: Blocks) -> int:
    """The most elements that one rank sends to, or gets from, others."""
    sent: dict[tuple[str, int], int] = {}
    for sender, receiver, block in parcels_between(source, target):
        if sender != receiver:
            for side in (("out", sender), ("in", receiver)):
                sent[side] = sent.get(side, 0) + block.volume
    return max(sent.values(), default=0)


def _common(a: Block, b: Block) -> Block | None:
    offset = tuple(map(max, a.offset, b.offset))
    ends = [min(p + n, q + m) for p, n, q, m in zip(a.offset, a.size, b.offset, b.size, strict=True)]
    size = tuple(end - start for end, start in zip(ends, offset, strict=True))
    return Block(offset, size) if all(n > 0 for n in size) else None


def exchange(x: Tensor, plan: Exchange) -> Tensor:
    """This rank's block of ``plan.target`` from its block ``x`` of ``plan.source``; an empty tensor where it wants nothing.

    All ranks of the group call; ranks without a block give an empty 1-D tensor of the dtype and device. Differentiable:
    copies have equal gradients, and backward is the exchange back. Communication: one all-to-all of what others lack.
    """
    return _functions().Exchanged.apply(x, plan)


@once
def _functions(platform: Any) -> SimpleNamespace:
    class Exchanged(platform.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, plan: Exchange) -> Tensor:
            ctx.plan = plan
            return _exchanged(platform, platform.detach(x), plan)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return Exchanged.apply(g, ctx.plan.reversed()), None

    return SimpleNamespace(Exchanged=Exchanged)


def _exchanged(platform: Any, x: Tensor, plan: Exchange) -> Tensor:
    me, ranks = plan.group.global_rank, plan.group.ranks
    parcels = plan.parcels()
    outgoing = [[p.block for p in parcels if p.sender == me and p.receiver == rank != me] for rank in ranks]
    incoming = [[p.block for p in parcels if p.receiver == me and p.sender == rank != me] for rank in ranks]
    sent = [
        platform.reshape(block.part(x, plan.source[me]), (-1,)) for blocks in outgoing for block in blocks
    ]
    empty = platform.empty((0,), x.dtype, platform.device_of(x))
    arrived = empty
    if plan.group.size > 1:
        arrived = collectives.all_to_all(
            platform.cat(sent) if sent else empty,
            plan.group,
            in_sizes=[sum(block.volume for block in blocks) for blocks in outgoing],
            out_sizes=[sum(block.volume for block in blocks) for blocks in incoming],
        )
    if me not in plan.target:
        return empty
    wanted = plan.target[me]
    pieces = {}
    sizes = [block.volume for blocks in incoming for block in blocks]
    flat = platform.split(arrived, sizes) if sizes else []
    for block, values in zip(itertools.chain(*incoming), flat, strict=True):
        pieces[block] = platform.reshape(values, block.size)
    for parcel in parcels:
        if parcel.sender == parcel.receiver == me:
            pieces[parcel.block] = parcel.block.part(x, plan.source[me])
    if not pieces:
        return platform.empty(wanted.size, x.dtype, platform.device_of(x))
    return platform.contiguous(_joined(platform, pieces, 0))


def _joined(platform: Any, pieces: dict[Block, Tensor], dim: int) -> Tensor:
    """The blocks of a grid put together, along ``dim`` and the dims behind it."""
    if len(pieces) == 1:
        (only,) = pieces.values()
        return platform.clone(only)
    starts = sorted({block.offset[dim] for block in pieces})
    rows = [
        _joined(platform, {b: x for b, x in pieces.items() if b.offset[dim] == start}, dim + 1)
        for start in starts
    ]
    return rows[0] if len(rows) == 1 else platform.cat(rows, dim)
