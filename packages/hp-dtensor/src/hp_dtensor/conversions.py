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

(Reductions other than sums have gradients of their own: :mod:`hp_dtensor.reductions`.)

Every backward is built of functions of this table again, each the adjoint of the other, so second derivatives are right
too: a bare identity as the backward of all-reduce would make them wrong without a word.
(hp_platform.collectives.differentiable has another convention: there every rank's loss counts.)
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hp_dtensor import transport
from hp_dtensor.no_elements import zeros_from
from hp_dtensor.simulation import SimulatedGroup
from hp_dtensor.transport import Cut as Cut
from hp_platform import ProcessGroup, collectives, get_platform
from hp_platform.on_platform import once

Tensor = Any

Arrived = tuple[Tensor] | None
"""The result of a collective that was started before (see :mod:`hp_dtensor.transport`); None: it is run now."""


def gather(x: Tensor, cut: Cut, arrived: Arrived = None) -> Tensor:
    """Shard to Replicate. One all-gather of the whole's bytes; backward: slice."""
    return _functions().Gather.apply(x, cut, arrived)


def gather_varying(x: Tensor, cut: Cut, arrived: Arrived = None, used: Any = None) -> Tensor:
    """Shard to a Replicate that each rank uses differently. One all-gather; backward: one reduce-scatter.

    ``used()`` is called when the backward begins.
    """
    return _functions().GatherVarying.apply(x, cut, arrived, used)


def slice_out(x: Tensor, cut: Cut) -> Tensor:
    """Replicate to Shard. No communication; backward: one all-gather."""
    return _functions().Slice.apply(x, cut)


def reduce_scatter(x: Tensor, cut: Cut, arrived: Arrived = None) -> Tensor:
    """Sum to Shard. One reduce-scatter of the whole's bytes; backward: one all-gather."""
    return _functions().ReduceScatter.apply(x, cut, arrived)


def all_to_all(x: Tensor, source: Cut, target: Cut, arrived: Arrived = None) -> Tensor:
    """Shard to Shard of another dim. One all-to-all of the local bytes, forward and backward."""
    return _functions().AllToAll.apply(x, source, target, arrived)


def all_reduce(x: Tensor, group: ProcessGroup, arrived: Arrived = None) -> Tensor:
    """Sum to Replicate. One all-reduce; backward: the identity."""
    return _functions().AllReduce.apply(x, group, arrived)


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


def gather_each(x: Tensor, group: ProcessGroup | SimulatedGroup, position: int) -> Tensor:
    """The ranks' tensors along dim 0, in the group's order, for an expression that differs between ranks.

    ``position`` is this rank's in the group. One all-gather; backward: one all-reduce of the result's size.
    """
    return _functions().GatherEach.apply(x, group, position)


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


@once
def _functions(platform: Any) -> SimpleNamespace:
    """The autograd Functions of a framework: they must inherit from its class, so they are defined when it is known."""
    base: Any = platform.Function

    class Gather(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, cut: Cut, arrived: Arrived) -> Tensor:
            ctx.cut = cut
            return transport.gather(x, cut) if arrived is None else arrived[0]

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return Slice.apply(g, ctx.cut), None, None

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
            return Gather.apply(g, ctx.cut, None), None

    class GatherVarying(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, cut: Cut, arrived: Arrived, used: Any) -> Tensor:
            ctx.cut, ctx.used = cut, used
            return transport.gather(x, cut) if arrived is None else arrived[0]

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            if ctx.used is not None:
                ctx.used()
            return ReduceScatter.apply(g, ctx.cut, None), None, None, None

    class ReduceScatter(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, cut: Cut, arrived: Arrived) -> Tensor:
            ctx.cut = cut
            return transport.reduce_scatter(x, cut) if arrived is None else arrived[0]

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return GatherVarying.apply(g, ctx.cut, None, None), None, None

    class AllToAll(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, source: Cut, target: Cut, arrived: Arrived) -> Tensor:
            ctx.source, ctx.target = source, target
            return transport.all_to_all(x, source, target) if arrived is None else arrived[0]

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return AllToAll.apply(g, ctx.target, ctx.source, None), None, None, None

    class AllReduce(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: ProcessGroup, arrived: Arrived) -> Tensor:
            ctx.group = group
            return reduced(platform.detach(x), group) if arrived is None else arrived[0]

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return Mark.apply(g, (ctx.group,), None), None, None

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
                g = AllReduce.apply(g, group, None)
            return g, None, None

    class GatherEach(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: ProcessGroup, position: int) -> Tensor:
            ctx.group, ctx.position, ctx.input = group, position, x
            return gathered(platform.detach(x), group)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            # For the second derivative: the total is equal on all ranks, of which each takes another part, hence the mark;
            # and a rank that uses nothing of the others has a constant here, but must meet them in the backward of this.
            size = ctx.input.shape[0]
            g = g if platform.requires_grad(g) else g + zeros_from(g, [ctx.input])
            total = Mark.apply(AllReduce.apply(g, ctx.group, None), (ctx.group,), None)
            return platform.narrow(total, 0, ctx.position * size, size), None, None

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

    defined = (Gather, GatherVarying, Slice, ReduceScatter, AllToAll, AllReduce, Mark, GatherEach, KeepOnOne)
    return SimpleNamespace(**{function.__name__: function for function in defined})
