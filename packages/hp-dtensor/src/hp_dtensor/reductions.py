"""From a Partial of any reduction to Replicate or Shard and back, with the gradients of the unsharded operation.

A sum and an average are linear: :mod:`hp_dtensor.conversions` has them. Of the others, with x_r the ranks' values, y their
reduction and g the gradient of y:

* max, min: x_r gets ``g * (x_r == y) / n``, where n ranks tie: what torch.max does with ties, also where these are NaN. (Ties
  *inside* of one rank's share are the affair of the operation that made it.)
* prod: x_r gets g times the product of the other ranks' values, also where some are zero. The backward gathers them.
* all, any: reductions of bools, without gradient.

[Note: gradients of factors] All three gradients are linear in g, and each rank uses g differently. So g passes a mark (see
:func:`hp_dtensor.conversions.mark`) before it is multiplied, and second derivatives are right.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

from hp_dtensor import conversions, transport
from hp_dtensor.no_elements import has_gradients
from hp_dtensor.transport import Cut
from hp_platform import ProcessGroup, get_platform
from hp_platform.on_platform import once

Tensor = Any

COLLECTIVE_OF: Final = {"max": "max", "min": "min", "prod": "prod", "all": "min", "any": "max"}
"""Reduction -> the operation that the collective is asked for; bools are reduced as integers."""


def check_reducible(x: Tensor, op: str) -> None:
    """ValueError if values of this dtype have no such reduction."""
    platform = get_platform()
    name = platform.dtype_name(x.dtype)
    if op == "avg" and not has_gradients(x):
        raise ValueError(f"Partial('avg') of {name} would round: use a floating dtype, or Partial('sum')")
    # torch's all() and any() of bytes give bytes, 0 and 1.
    if op in ("all", "any") and name not in ("bool", "uint8"):
        raise ValueError(f"Partial({op!r}) is of bools, got {name}: compare first, for example x != 0")
    if name == "bool" and op not in ("all", "any", "max", "min"):
        raise ValueError(f"Partial({op!r}) of bool has no meaning: use Partial('any') or Partial('all')")


def all_reduce(x: Tensor, group: ProcessGroup, op: str, arrived: conversions.Arrived = None) -> Tensor:
    """Partial to Replicate. One all-reduce; backward: one all-reduce more (max, min), or two and an all-gather (prod)."""
    return _functions().Reduced.apply(x, group, op, arrived)


def reduce_scatter(x: Tensor, cut: Cut, op: str, arrived: conversions.Arrived = None) -> Tensor:
    """Partial to Shard. One reduce-scatter; backward: an all-gather of the gradient, and what :func:`all_reduce` needs."""
    return _functions().ReducedChunk.apply(x, cut, op, arrived)


def to_partial(x: Tensor, group: ProcessGroup, op: str, is_first: bool) -> Tensor:
    """Replicate to Partial, bit-exact and without communication.

    max, min, all, any: every rank holds the value; backward: one all-reduce. prod: the first rank holds it, the others ones;
    backward: one all-reduce.
    """
    return _functions().Spread.apply(x, group, op == "prod" and not is_first)


def _kept_gradient(x: Tensor, g: Tensor, whole: Tensor, group: ProcessGroup, op: str) -> Tensor:
    """The gradient of x_r; ``g`` is behind its mark. Differentiable in g, and for products in x."""
    platform: Any = get_platform()
    if op == "prod":
        return g * _product_of_others(platform, x, group)
    decides = platform.cast(alike(platform.detach(x), whole), g.dtype)
    return g * (decides / transport.all_reduce(decides, group))


def alike(x: Tensor, y: Tensor) -> Tensor:
    """Where ``x`` and ``y`` are equal, or both NaN."""
    return (x == y) | ((x != x) & (y != y))


def _product_of_others(platform: Any, x: Tensor, group: ProcessGroup) -> Tensor:
    row = platform.reshape(x, (1, *x.shape))
    order = tuple(range(group.size))
    mine = order.index(group.rank)
    values = conversions.gather_varying(row, Cut(group, order, mine, 0, (1,) * group.size))
    product: Any = None
    for position in order:
        if position != mine:
            value = platform.reshape(platform.narrow(values, 0, position, 1), tuple(x.shape))
            product = value if product is None else product * value
    return product


@once
def _functions(platform: Any) -> SimpleNamespace:
    base: Any = platform.Function

    class Reduced(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: ProcessGroup, op: str, arrived: Any) -> Tensor:
            whole = transport.all_reduce(x, group, COLLECTIVE_OF[op]) if arrived is None else arrived[0]
            ctx.group, ctx.op = group, op
            ctx.save_for_backward(x, whole)
            return whole

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            x, whole = ctx.saved_tensors
            g = conversions.mark(g, (ctx.group,))
            grad = _kept_gradient(x, g, platform.detach(whole), ctx.group, ctx.op)
            return grad, None, None, None

    class ReducedChunk(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, cut: Cut, op: str, arrived: Any) -> Tensor:
            chunk = transport.reduce_scatter(x, cut, COLLECTIVE_OF[op]) if arrived is None else arrived[0]
            ctx.cut, ctx.op = cut, op
            ctx.save_for_backward(x, chunk)
            return chunk

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            x, chunk = ctx.saved_tensors
            whole = None if ctx.op == "prod" else transport.gather(chunk, ctx.cut)
            g = conversions.gather_varying(g, ctx.cut)
            return _kept_gradient(x, g, whole, ctx.cut.group, ctx.op), None, None, None

    class Spread(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: ProcessGroup, is_one: bool) -> Tensor:
            ctx.group, ctx.is_one = group, is_one
            x = platform.detach(x)
            return platform.full(tuple(x.shape), 1, x.dtype, platform.device_of(x)) if is_one else x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            # Where the value is a constant, its gradient counts for nothing.
            own = platform.zeros_like(g) if ctx.is_one else g
            return conversions.all_reduce(own, ctx.group), None, None

    return SimpleNamespace(Reduced=Reduced, ReducedChunk=ReducedChunk, Spread=Spread)
