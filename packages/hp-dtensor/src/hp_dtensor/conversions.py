"""What turns the local values of one placement along one mesh dim into those of another, with gradients.

[Note: how gradients are counted] A sharded tensor is one tensor, and a replicated loss is one loss. So the gradient of a
Shard is a Shard, that of a Replicate and that of a sum (Partial) is Replicate. Where a Replicate input meets an operation
whose output differs along the mesh dim, each rank sees only a summand of its gradient: :func:`mark` stands there, an
identity whose backward sums. Hence:

=======================  ======================  =========================================
forward                  backward                used for
=======================  ======================  =========================================
all-reduce               identity (mark)         Partial to Replicate
identity (mark)          all-reduce              Replicate into an operation that differs
all-gather               slice                   Shard to Replicate, used alike
slice                    all-gather              Replicate to Shard
reduce-scatter           all-gather              Partial to Shard
all-gather (varying)     reduce-scatter          Shard to Replicate, used differently
all-to-all               all-to-all              Shard to Shard
one rank keeps           identity                Replicate to Partial
=======================  ======================  =========================================

Every backward is built of functions of this table again, each the adjoint of the other, so second derivatives are right
too: a bare identity as the backward of all-reduce would make them wrong without a word.
(hp_platform.collectives.differentiable has another convention: there every rank's loss counts.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from hp_dtensor.simulation import SimulatedGroup
from hp_platform import ProcessGroup, collectives, get_platform

Tensor = Any


@dataclass(frozen=True, eq=False)
class Cut:
    """How tensor dim ``dim`` is dealt to the ranks along a mesh dim."""

    group: ProcessGroup
    positions: tuple[int, ...]
    """For each coordinate along the mesh dim its position in the group, whose ranks ascend whatever the mesh says."""
    index: int
    """This rank's coordinate."""
    dim: int
    sizes: tuple[int, ...]
    """Of the chunks, by coordinate."""

    @property
    def is_even(self) -> bool:
        """Whether blocks of equal size lie in the group's order: what the plain collectives take."""
        return self.sizes[0] == self.sizes[-1] and self.positions == tuple(range(len(self.positions)))

    @property
    def by_position(self) -> tuple[int, ...]:
        """For each position in the group its coordinate."""
        return tuple(sorted(range(len(self.positions)), key=self.positions.__getitem__))


def gather(x: Tensor, cut: Cut) -> Tensor:
    """Shard to Replicate. One all-gather of the whole's bytes; backward: slice."""
    return _functions().Gather.apply(x, cut)


def gather_varying(x: Tensor, cut: Cut) -> Tensor:
    """Shard to a Replicate that each rank uses differently. One all-gather; backward: one reduce-scatter."""
    return _functions().GatherVarying.apply(x, cut)


def slice_out(x: Tensor, cut: Cut) -> Tensor:
    """Replicate to Shard. No communication; backward: one all-gather."""
    return _functions().Slice.apply(x, cut)


def reduce_scatter(x: Tensor, cut: Cut) -> Tensor:
    """Sum to Shard. One reduce-scatter of the whole's bytes; backward: one all-gather."""
    return _functions().ReduceScatter.apply(x, cut)


def all_to_all(x: Tensor, source: Cut, target: Cut) -> Tensor:
    """Shard to Shard of another dim. One all-to-all of the local bytes, forward and backward."""
    return _functions().AllToAll.apply(x, source, target)


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum to Replicate. One all-reduce; backward: the identity."""
    return _functions().AllReduce.apply(x, group)


def mark(x: Tensor, groups: tuple[ProcessGroup, ...], used: Any = None) -> Tensor:
    """Replicate into an operation that differs along these groups. Backward: one all-reduce per group.

    ``used()`` is called when the backward begins.
    """
    return _functions().Mark.apply(x, groups, used)


def reduced(x: Tensor, group: ProcessGroup | SimulatedGroup, op: str = "sum") -> Tensor:
    """The ranks' reduction of a detached tensor, as :func:`hp_platform.collectives.all_reduce` gives it."""
    return (
        group.all_reduce(x, op) if isinstance(group, SimulatedGroup) else collectives.all_reduce(x, group, op)
    )


def gathered(x: Tensor, group: ProcessGroup | SimulatedGroup) -> Tensor:
    """The ranks' detached tensors along dim 0, as :func:`hp_platform.collectives.all_gather` gives them."""
    return group.all_gather(x) if isinstance(group, SimulatedGroup) else collectives.all_gather(x, group)


def keep_on(x: Tensor, keeps: bool) -> Tensor:
    """Replicate to a sum: one rank keeps the value, the others hold zeros. Bit-exact, no communication; backward: identity."""
    return _functions().KeepOnOne.apply(x, keeps)


def pad(x: Tensor, cut: Cut) -> Tensor:
    """Shard to a sum: the own chunk among zeros. No communication; backward: the own chunk of the gradient."""
    platform = get_platform()

    def zeros(size: int) -> list[Tensor]:
        shape = (*x.shape[: cut.dim], size, *x.shape[cut.dim + 1 :])
        return [platform.zeros(shape, x.dtype, platform.device_of(x))] if size else []

    # The framework's own derivative of cat is just the adjoint that is wanted here: the gradient is Replicate.
    return platform.cat(
        [*zeros(sum(cut.sizes[: cut.index])), x, *zeros(sum(cut.sizes[cut.index + 1 :]))], cut.dim
    )


def _functions() -> SimpleNamespace:
    platform: Any = get_platform()
    return _defined(platform)


@cache
def _defined(platform: Any) -> SimpleNamespace:
    """The autograd Functions of a framework: they must inherit from its class, so they are defined when it is known."""
    base: Any = platform.Function

    class Gather(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, cut: Cut) -> Tensor:
            ctx.cut = cut
            return _gathered(platform, x, cut)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return Slice.apply(g, ctx.cut), None

    class Slice(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, cut: Cut) -> Tensor:
            ctx.cut = cut
            piece = platform.narrow(
                platform.detach(x), cut.dim, sum(cut.sizes[: cut.index]), cut.sizes[cut.index]
            )
            return platform.clone(piece)  # its own memory, so that the whole can be freed

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return Gather.apply(g, ctx.cut), None

    class GatherVarying(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, cut: Cut) -> Tensor:
            ctx.cut = cut
            return _gathered(platform, x, cut)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return ReduceScatter.apply(g, ctx.cut), None

    class ReduceScatter(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, cut: Cut) -> Tensor:
            ctx.cut = cut
            return _reduce_scattered(platform, x, cut)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return GatherVarying.apply(g, ctx.cut), None

    class AllToAll(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, source: Cut, target: Cut) -> Tensor:
            ctx.source, ctx.target = source, target
            return _exchanged(platform, x, source, target)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return AllToAll.apply(g, ctx.target, ctx.source), None, None

    class AllReduce(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
            ctx.group = group
            return reduced(x, group)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return Mark.apply(g, (ctx.group,), None), None

    class Mark(base):
        # Saves no tensor, so that checkpointing counts the same whether a mark is made or found. detach() shares the
        # version counter, so that a later in-place write is noticed, and is no view.
        @staticmethod
        def forward(ctx: Any, x: Tensor, groups: tuple[ProcessGroup, ...], used: Any) -> Tensor:
            ctx.groups, ctx.used = groups, used
            return platform.detach(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            if ctx.used is not None:
                ctx.used()
            for group in ctx.groups:
                g = AllReduce.apply(g, group)
            return g, None, None

    class KeepOnOne(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, keeps: bool) -> Tensor:
            ctx.keeps = keeps
            return platform.clone(platform.detach(x)) if keeps else platform.zeros_like(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return GradientOfKept.apply(g, ctx.keeps), None

    class GradientOfKept(base):
        @staticmethod
        def forward(ctx: Any, g: Tensor, keeps: bool) -> Tensor:
            ctx.keeps = keeps
            return platform.detach(g)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return KeepOnOne.apply(g, ctx.keeps), None

    defined = (Gather, GatherVarying, Slice, ReduceScatter, AllToAll, AllReduce, Mark, KeepOnOne)
    return SimpleNamespace(**{function.__name__: function for function in defined})


def _gathered(platform: Any, x: Tensor, cut: Cut) -> Tensor:
    x = platform.detach(x)
    if cut.is_even:
        stacked = collectives.all_gather(x, cut.group)
        if cut.dim == 0:
            return stacked
        return platform.cat(platform.split(stacked, [x.shape[0]] * len(cut.sizes)), cut.dim)
    rows = x if cut.dim == 0 else platform.transpose(x, 0, cut.dim)
    pieces = collectives.all_gather_uneven(rows, [cut.sizes[c] for c in cut.by_position], cut.group)
    whole = platform.cat([pieces[position] for position in cut.positions])
    return whole if cut.dim == 0 else platform.contiguous(platform.transpose(whole, 0, cut.dim))


def _reduce_scattered(platform: Any, x: Tensor, cut: Cut) -> Tensor:
    x = platform.detach(x)
    if cut.is_even:
        if cut.dim != 0:
            x = platform.cat(platform.split(x, list(cut.sizes), cut.dim))
        return collectives.reduce_scatter(x, cut.group)
    rows = x if cut.dim == 0 else platform.transpose(x, 0, cut.dim)
    pieces = platform.split(rows, list(cut.sizes))
    mine = collectives.reduce_scatter_uneven([pieces[c] for c in cut.by_position], cut.group)
    return mine if cut.dim == 0 else platform.contiguous(platform.transpose(mine, 0, cut.dim))


def _exchanged(platform: Any, x: Tensor, source: Cut, target: Cut) -> Tensor:
    """Blocks travel flat, in the group's order, because their shapes differ from rank to rank."""
    pieces = platform.split(platform.detach(x), list(target.sizes), target.dim)
    sent = [platform.reshape(pieces[c], (-1,)) for c in source.by_position]
    shapes = []
    for size in source.sizes:
        shape = list(x.shape)
        shape[target.dim], shape[source.dim] = target.sizes[target.index], size
        shapes.append(tuple(shape))
    by_position = [shapes[c] for c in source.by_position]
    sizes = [math.prod(shape) for shape in by_position]
    arrived = collectives.all_to_all(
        platform.cat(sent), source.group, in_sizes=[piece.shape[0] for piece in sent], out_sizes=sizes
    )
    blocks = [
        platform.reshape(block, shape)
        for block, shape in zip(platform.split(arrived, sizes), by_position, strict=True)
    ]
    return platform.cat([blocks[position] for position in source.positions], source.dim)
