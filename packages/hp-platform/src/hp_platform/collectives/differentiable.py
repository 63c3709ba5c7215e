"""Collectives inside of a differentiated program. Each is the adjoint of another one here, so second derivatives are right too.

The program that is differentiated is the sum over ranks of the ranks' losses: with ``y_r = f_r(x_0 ... x_n)`` on rank r, the
gradient of ``x_i`` is ``sum over r of (dy_r / dx_i)^T g_r``. Hence:

=====================  =========================================
forward                backward
=====================  =========================================
all_reduce sum, mean   all_reduce sum, mean
all_gather             reduce_scatter sum
reduce_scatter         all_gather (divided by the ranks for mean)
all_to_all             all_to_all with the sizes exchanged
broadcast              sum over ranks on the source, zeros elsewhere
scatter                gather
gather                 scatter
exchange               exchange in the other direction
=====================  =========================================

In a group of one rank nothing is communicated: each is the identity, scatter and gather (and all_gather of a 0-d tensor) a
change of shape. How gradients of *sharded tensors* are counted (a replicated
loss is one loss, not one per rank) is a convention above this one, and stands in hp-dtensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hp_platform import collectives
from hp_platform.collectives._launch import check_member, resolve
from hp_platform.collectives.reduce import normalize_op
from hp_platform.group import ProcessGroup
from hp_platform.on_platform import once
from hp_platform.platform import Platform, get_platform
from hp_platform.protocols.tensor import Tensor


def all_reduce(x: Tensor, group: ProcessGroup | None = None, op: str = "sum") -> Tensor:
    """Differentiable :func:`hp_platform.collectives.all_reduce`, sum or mean. Backward: one all-reduce of the same bytes."""
    group, op = resolve(group), _linear(op)
    return x if group.size == 1 else _functions().AllReduce.apply(x, group, op)


def all_gather(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Differentiable all_gather: ``(n, ...)`` to ``(ranks * n, ...)``; a 0-d tensor counts as ``(1,)``.

    Backward: one reduce-scatter of the result's bytes.
    """
    group = resolve(group)
    if x.ndim == 0:
        x = get_platform().reshape(x, (1,))
    return x if group.size == 1 else _functions().AllGather.apply(x, group)


def all_gather_uneven(x: Tensor, sizes: Sequence[int], group: ProcessGroup | None = None) -> Tensor:
    """Differentiable all_gather_uneven, stacked: rank r's ``(sizes[r], ...)`` to ``(sum(sizes), ...)``. Backward: one reduce-scatter."""
    group = resolve(group)
    return x if group.size == 1 else _functions().AllGatherUneven.apply(x, tuple(sizes), group)


def reduce_scatter(x: Tensor, group: ProcessGroup | None = None, op: str = "sum") -> Tensor:
    """Differentiable reduce_scatter, sum or mean: ``(ranks * n, ...)`` to ``(n, ...)``. Backward: one all-gather of ``x``'s bytes."""
    group, op = resolve(group), _linear(op)
    if group.size == 1:
        return x
    scattered = _functions().ReduceScatter.apply(x, group)
    return scattered / group.size if op == "mean" else scattered


def all_to_all(
    x: Tensor,
    group: ProcessGroup | None = None,
    *,
    in_sizes: Sequence[int] | None = None,
    out_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Differentiable all_to_all. Backward: one all-to-all of the result's bytes, with the two lists of sizes exchanged."""
    group = resolve(group)
    if group.size == 1:
        return x
    return _functions().AllToAll.apply(
        x,
        group,
        None if in_sizes is None else tuple(in_sizes),
        None if out_sizes is None else tuple(out_sizes),
    )


def broadcast(x: Tensor, src: int, group: ProcessGroup | None = None) -> Tensor:
    """Differentiable broadcast from global rank ``src``. Backward: one all-reduce; the sum lands on ``src``, zeros elsewhere."""
    group = resolve(group)
    check_member(group, src, "src")
    return x if group.size == 1 else _functions().Broadcast.apply(x, src, group)


def scatter(x: Tensor, src: int, group: ProcessGroup | None = None) -> Tensor:
    """Row ``[this rank]`` of ``x`` ``(ranks, ...)`` of global rank ``src``. ``x`` has this shape everywhere, its values count on ``src`` only.

    Backward: one gather to ``src``; zeros elsewhere.
    """
    group = resolve(group)
    check_member(group, src, "src")
    if x.ndim == 0 or x.shape[0] != group.size:
        raise ValueError(f"scatter needs one row per rank, ({group.size}, ...); got shape {tuple(x.shape)}")
    if group.size == 1:
        return get_platform().reshape(x, tuple(x.shape[1:]))
    return _functions().Scatter.apply(x, src, group)


def gather(x: Tensor, dst: int, group: ProcessGroup | None = None) -> Tensor:
    """``(ranks, ...)`` of the ranks' ``x`` on global rank ``dst``, zeros elsewhere. Backward: one scatter from ``dst``."""
    group = resolve(group)
    check_member(group, dst, "dst")
    if group.size == 1:
        return get_platform().reshape(x, (1, *x.shape))
    return _functions().Gather.apply(x, dst, group)


def exchange(x: Tensor, dst: int, src: int, group: ProcessGroup | None = None) -> Tensor:
    """Send ``x`` to global rank ``dst`` and return what ``src`` sends here (same shape): a step of a ring.

    ``dst`` and ``src`` may both be this rank (identity). Every rank's ``dst`` must name it as ``src``.
    Backward: one exchange in the other direction.
    """
    group = resolve(group)
    check_member(group, dst, "dst")
    check_member(group, src, "src")
    me = group.global_rank
    if (dst == me) != (src == me):
        raise ValueError(
            f"rank {me} cannot send to {dst} and receive from {src}: it is its own peer in both directions or in none"
        )
    return x if dst == me else _functions().Exchange.apply(x, dst, src, group)


def _linear(op: str) -> str:
    name = normalize_op(op)
    if name not in ("sum", "mean"):
        raise ValueError(f"{name} has no linear adjoint; differentiable reductions are sum and mean")
    return name


@once
def _functions(platform: Platform) -> SimpleNamespace:
    """The autograd Functions of a framework: they must inherit from its class, so they are defined when it is known."""

    class AllReduce(platform.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: ProcessGroup, op: str) -> Tensor:
            ctx.group, ctx.op = group, op
            return collectives.all_reduce(x, group, op)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return AllReduce.apply(g, ctx.group, ctx.op), None, None

    class AllGather(platform.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
            ctx.group, ctx.shape = group, tuple(x.shape)
            return collectives.all_gather(x, group)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return platform.reshape(ReduceScatter.apply(g, ctx.group), ctx.shape), None

    class ReduceScatter(platform.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
            ctx.group = group
            return collectives.reduce_scatter(x, group)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return AllGather.apply(g, ctx.group), None

    class AllGatherUneven(platform.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], group: ProcessGroup) -> Tensor:
            ctx.sizes, ctx.group = sizes, group
            return platform.cat(collectives.all_gather_uneven(x, sizes, group))

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return ReduceScatterUneven.apply(g, ctx.sizes, ctx.group), None, None

    class ReduceScatterUneven(platform.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], group: ProcessGroup) -> Tensor:
            ctx.sizes, ctx.group = sizes, group
            return collectives.reduce_scatter_uneven(platform.split(x, list(sizes)), group)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return AllGatherUneven.apply(g, ctx.sizes, ctx.group), None, None

    class AllToAll(platform.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: ProcessGroup, in_sizes: Any, out_sizes: Any) -> Tensor:
            ctx.group, ctx.in_sizes, ctx.out_sizes = group, in_sizes, out_sizes
            return collectives.all_to_all(x, group, in_sizes=in_sizes, out_sizes=out_sizes)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return AllToAll.apply(g, ctx.group, ctx.out_sizes, ctx.in_sizes), None, None, None

    class Broadcast(platform.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(ctx: Any, x: Tensor, src: int, group: ProcessGroup) -> Tensor:
            ctx.src, ctx.group = src, group
            return collectives.broadcast(x, src, group)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return SumOnto.apply(g, ctx.src, ctx.group), None, None

    class SumOnto(platform.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(ctx: Any, x: Tensor, dst: int, group: ProcessGroup) -> Tensor:
            ctx.dst, ctx.group = dst, group
            total = collectives.all_reduce(x, group)
            return total if group.global_rank == dst else platform.zeros_like(total)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return Broadcast.apply(g, ctx.dst, ctx.group), None, None

    class Scatter(platform.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(ctx: Any, x: Tensor, src: int, group: ProcessGroup) -> Tensor:
            ctx.src, ctx.group = src, group
            rows = [platform.reshape(row, tuple(x.shape[1:])) for row in platform.split(x, [1] * group.size)]
            return platform.clone(
                collectives.scatter(rows if group.global_rank == src else None, rows[0], src, group)
            )

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return Gather.apply(g, ctx.src, ctx.group), None, None

    class Gather(platform.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(ctx: Any, x: Tensor, dst: int, group: ProcessGroup) -> Tensor:
            ctx.dst, ctx.group = dst, group
            rows = collectives.gather(x, dst, group)
            if rows is None:
                return platform.zeros((group.size, *x.shape), x.dtype, platform.device_of(x))
            return platform.cat([platform.reshape(row, (1, *x.shape)) for row in rows])

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return Scatter.apply(g, ctx.dst, ctx.group), None, None

    class Exchange(platform.Function):  # type: ignore[name-defined]
        @staticmethod
        def forward(ctx: Any, x: Tensor, dst: int, src: int, group: ProcessGroup) -> Tensor:
            ctx.dst, ctx.src, ctx.group = dst, src, group
            both = [collectives.P2POp("send", x, dst), collectives.P2POp("recv", x, src)]
            return collectives.batch_send_recv(both, group).wait()[0]

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return Exchange.apply(g, ctx.src, ctx.dst, ctx.group), None, None, None

    defined = (
        AllReduce,
        AllGather,
        ReduceScatter,
        AllGatherUneven,
        AllToAll,
        Broadcast,
        Scatter,
        Gather,
        Exchange,
    )
    return SimpleNamespace(**{function.__name__: function for function in defined})
