"""Collectives with gradients for code that a compiler records (``platform.is_compiling()``), so that they are a part of its graph.

A piece of a tensor is one of n equal ones, in the group's order. Gradients are counted as one tensor and one loss: that of a
whole tensor is whole, but what :func:`mark` and :func:`gather_varying` give is used differently by each rank, and its
gradients are summands. There are no records, no time-outs and no second derivatives.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from hp_platform.group import ProcessGroup
from hp_platform.on_platform import once
from hp_platform.platform import get_platform
from hp_platform.protocols.tensor import Tensor


class TracedGroup(NamedTuple):
    """A group as compiled code knows it."""

    name: str
    size: int
    functions: Any
    """Those below, at hand: a table that grows would have compiled code compiled again."""


def traced_group(group: ProcessGroup) -> TracedGroup | None:
    """The group for the functions of this module; None where there is nothing to compile. Asked outside of compiled code."""
    platform = get_platform()
    if not platform.supports("traced_collectives"):
        return None
    name = "" if group.size == 1 else platform.traced_name(group.native)
    return TracedGroup(name, group.size, _functions())


def mark(x: Tensor, group: TracedGroup) -> Tensor:
    """A whole tensor for something that differs between ranks. Backward: one all-reduce."""
    return x if group.size == 1 else group.functions.Mark.apply(x, group.name)


def all_reduce(x: Tensor, group: TracedGroup) -> Tensor:
    """The sum of the ranks' summands: one all-reduce. Backward: nothing."""
    return x if group.size == 1 else group.functions.AllReduce.apply(x, group.name)


def gather(x: Tensor, dim: int, group: TracedGroup, rank: int) -> Tensor:
    """The whole, of pieces along ``dim``: one all-gather. Backward: the own piece, of position ``rank``."""
    return x if group.size == 1 else group.functions.Gather.apply(x, dim, group.size, group.name, rank)


def gather_varying(x: Tensor, dim: int, group: TracedGroup) -> Tensor:
    """The whole, for something that differs between ranks: one all-gather. Backward: one reduce-scatter."""
    return x if group.size == 1 else group.functions.GatherVarying.apply(x, dim, group.size, group.name)


def reduce_scatter(x: Tensor, dim: int, group: TracedGroup) -> Tensor:
    """This rank's piece of the sum of the ranks' summands: one reduce-scatter. Backward: one all-gather."""
    return x if group.size == 1 else group.functions.ReduceScatter.apply(x, dim, group.size, group.name)


def _gathered(x: Tensor, dim: int, size: int, name: str) -> Tensor:
    platform = get_platform()
    whole = platform.traced_all_gather(x, size, name)
    if dim == 0:
        return whole
    blocks = platform.reshape(whole, (size, *x.shape))
    blocks = _moved(blocks, 0, dim)
    return platform.reshape(blocks, (*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :]))


def _scattered(x: Tensor, dim: int, size: int, name: str) -> Tensor:
    platform = get_platform()
    piece = (*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :])
    blocks = platform.reshape(x, (*x.shape[:dim], size, *piece[dim:]))
    blocks = _moved(blocks, dim, 0)
    flat = platform.reshape(blocks, (size * piece[0], *piece[1:]))
    return platform.traced_reduce_scatter(flat, size, name)


def _moved(x: Tensor, start: int, end: int) -> Tensor:
    platform, step = get_platform(), 1 if end > start else -1
    for dim in range(start, end, step):
        x = platform.transpose(x, dim, dim + step)
    return x


class _Functions(SimpleNamespace):
    """The autograd Functions, which are pickled as what the other process' platform has."""

    def __reduce__(self) -> Any:
        return _functions, ()


@once
def _functions(platform: Any) -> _Functions:
    base: Any = platform.TraceableFunction

    class Mark(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
            ctx.name = name
            return platform.reshape(x, tuple(x.shape))

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return platform.traced_all_reduce(g, ctx.name), None

    class AllReduce(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
            return platform.traced_all_reduce(x, name)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return g, None

    class Gather(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, dim: int, size: int, name: str, rank: int) -> Tensor:
            ctx.dim, ctx.start, ctx.length = dim, rank * x.shape[dim], x.shape[dim]
            return _gathered(x, dim, size, name)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return platform.narrow(g, ctx.dim, ctx.start, ctx.length), None, None, None, None

    class GatherVarying(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, dim: int, size: int, name: str) -> Tensor:
            ctx.dim, ctx.size, ctx.name = dim, size, name
            return _gathered(x, dim, size, name)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return _scattered(g, ctx.dim, ctx.size, ctx.name), None, None, None

    class ReduceScatter(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, dim: int, size: int, name: str) -> Tensor:
            ctx.dim, ctx.size, ctx.name = dim, size, name
            return _scattered(x, dim, size, name)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            return _gathered(g, ctx.dim, ctx.size, ctx.name), None, None, None

    defined = (Mark, AllReduce, Gather, GatherVarying, ReduceScatter)
    return _Functions(**{function.__name__: function for function in defined})
