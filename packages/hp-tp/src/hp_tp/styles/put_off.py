"""Gradients of weights are computed while the gradient of the input, at whose door they stand, is on its way.

[Note: put-off products] Backward of a block ends with a collective: the gradients of an input that every rank used differently are added
up. What comes before it in the graph needs its result, so nothing runs beside it, unless something was left to do: the products that
give the gradients of the weights behind the door need nothing of it, and nobody before the door needs them. So they come last: first
the products that give the input's gradient, then the collective is started on the side stream, then the products for the weights, then it
is waited for. (Megatron-LM does this as "asynchronous all-reduce of input gradients": Shoeybi et al., arXiv 1909.08053; with a
reduce-scatter Korthikanti et al., arXiv 2205.05198.)

A door is two nodes of the graph for that, one that waits and one that starts, and a linear layer behind it is two, one for its weight and one
for its input::

    x -- waits -- starts -- whole -- of the input -- y
                                     weight -- of the weight --+

Backward runs of all nodes that are ready the one that was recorded last. Those of the weights are given the turn between the one that
starts and the one that waits. Results do not depend on turns, only what runs beside what: where other work is left at that moment,
or none, all gradients are the same. What backward gives from node to node is what it gives without turns, to the bit: the
products are those of the framework's own linear, on the same operands.

[Note: memory of put-off products] An input of a linear layer is kept for the gradient of the weight either way. The gradient of the result
is kept a little longer, until the collective has been started. In return a sum that nobody else holds, since all who used the whole
input are layers that were put off, is reduced in place, where a copy was made of it: so while the products for weights run there are
gradients of results, the input's, and what a product gives. Without putting off there were as many when the first layer's two products
were there. Of a reduction to pieces there is the piece beside that.

Backwards that are recorded (``create_graph``) run in the same nodes, but wait at once, and by operations that are recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

from hp_dtensor import conversions, transport
from hp_dtensor.module_tensors import is_dtensor
from hp_dtensor.transport import Cut
from hp_platform import ProcessGroup, collectives, get_platform
from hp_platform.on_platform import once
from hp_tp.overlap.matrices import Matrices
from hp_tp.overlap.scattered import reduce_beside
from hp_tp.overlap.side_stream import run_beside
from hp_tp.styles import moves
from hp_tp.styles.door import Door

Tensor = Any
Used = Callable[[], None] | None

MIN_NBYTES = 32 * 2**20
"""Bytes of a whole input from which on products are put off. A door is one node more then, and a layer two in Python for those of the
framework: where the host is behind the device, that is longer than the collective of a small input."""
_ATTRIBUTE = "_hp_tp_put_off"


class _Behind:
    """What the layers behind a door must know, kept with the whole input that the door made."""

    __slots__ = ("is_for_products", "turn")

    def __init__(self) -> None:
        self.turn = 0
        """Of the products for weights in backward."""
        self.is_for_products = True
        """Whether nothing but layers that were put off has got the whole input, so that the sum of their gradients is nobody else's."""


# ------------------------------------------------------------------------------------------------------------------- doors
def mark(x: Tensor, door: Door, used: Used) -> Tensor:
    """As :func:`hp_tp.styles.moves.mark`; what is computed for weights behind it is put off where that pays."""
    group = door.mesh.get_group(0)
    if not _pays(x, tuple(x.shape)) or not isinstance(group, ProcessGroup):
        return moves.mark(x, door, used)
    return _opened(x, _Sum(group), used)


def gather(x: Tensor, door: Door, dim: int, shape: tuple[int, ...], used: Used) -> Tensor:
    """As :func:`hp_tp.styles.moves.gather`; what is computed for weights behind it is put off where that pays."""
    # Collectives of uneven pieces allocate by themselves: see [Note: memory of the side stream].
    if not _pays(x, shape) or dim == len(shape) - 1 or shape[dim] % door.mesh.shape[0]:
        return moves.gather(x, door, dim, shape, used)
    cut = moves.cut_along(door.mesh, dim, shape)
    if not cut.is_even or not isinstance(cut.group, ProcessGroup):
        return moves.gather(x, door, dim, shape, used)
    return _opened(x, _Pieces(cut), used)


def is_elsewhere(whole: Tensor) -> Tensor:
    """The whole input, for others than :func:`linear`."""
    behind: _Behind | None = getattr(whole, _ATTRIBUTE, None)
    if behind is not None:
        behind.is_for_products = False
    return whole


def _pays(x: Tensor, shape: tuple[int, ...]) -> bool:
    platform = get_platform()
    if math.prod(shape) * platform.itemsize(x.dtype) < MIN_NBYTES or platform.is_compiling():
        return False
    if not (platform.is_grad_enabled() and platform.requires_grad(x)):
        return False
    device = platform.device_of(x)
    return platform.supports("backward_turns", device) and platform.supports("async_collectives", device)


def _opened(x: Tensor, reduction: _Reduction, used: Used) -> Tensor:
    platform, functions, behind = get_platform(), _functions(), _Behind()
    under_way: list[Callable[[], Tensor]] = []
    whole: Tensor = functions.Starts.apply(
        functions.Waits.apply(x, under_way), reduction, under_way, behind, used
    )
    behind.turn = platform.backward_turn(whole)
    # The next node that is recorded has this turn, too; if it is behind this door it comes before in any case.
    platform.set_backward_turn(whole, behind.turn + 1)
    setattr(whole, _ATTRIBUTE, behind)
    return whole


# ----------------------------------------------------------------------------------------------------------------- products
def linear(whole: Tensor, weight: Tensor, bias: Tensor | None, parameter: Any) -> Tensor:
    """``platform.linear``; behind a door that puts off, the gradients of weight and bias are.

    ``parameter``: what the module shows where ``weight`` comes from.
    """
    platform, behind = get_platform(), getattr(whole, _ATTRIBUTE, None)
    if behind is None or not _is_usual(whole, weight, bias, parameter):
        return platform.linear(is_elsewhere(whole), weight, bias)
    functions = _functions()
    # Operands in tuples are no edges of the graph: each node leads to what it has a gradient for, and nowhere else.
    y = functions.OfWeight.apply(weight, bias, (whole,))
    platform.set_backward_turn(y, behind.turn)
    result: Tensor = functions.OfInput.apply(whole, y, (weight,))
    return result


def _is_usual(x: Tensor, weight: Tensor, bias: Tensor | None, parameter: Any) -> bool:
    """Whether the framework's linear would be one product of matrices, which are as they are given, for a weight that learns.

    What stands in for a parameter that is not there yet, or computes gradients in its own way (of hp_fsdp), goes there itself.
    """
    platform = get_platform()
    return (
        is_dtensor(parameter)
        and not is_dtensor(weight)
        and platform.is_grad_enabled()
        and platform.requires_grad(weight)
        and x.dtype == weight.dtype == platform.product_dtype(x)
        and (bias is None or bias.dtype == x.dtype)
        and len(x.shape) > 1
        and platform.is_contiguous(x)
    )


# --------------------------------------------------------------------------------------------------------------- reductions
class _Reduction(Protocol):
    """What a door does to gradients."""

    def whole(self, x: Tensor) -> Tensor:
        """Forward: the whole input."""
        ...

    def start(self, g: Tensor, *, is_ours: bool) -> tuple[Tensor, Callable[[], Tensor]]:
        """Something of the result's shape, and what waits for the result. ``is_ours``: nobody else reads ``g``."""
        ...

    def recorded(self, g: Tensor) -> Tensor:
        """The result as a function that can be differentiated."""
        ...


@dataclass(frozen=True, eq=False)
class _Sum:
    """Of a whole input: one all-reduce."""

    group: ProcessGroup

    def whole(self, x: Tensor) -> Tensor:
        return get_platform().detach(x)

    def start(self, g: Tensor, *, is_ours: bool) -> tuple[Tensor, Callable[[], Tensor]]:
        platform = get_platform()
        total = platform.contiguous(g)
        if not is_ours and platform.data_ptr(total) == platform.data_ptr(g):
            total = platform.clone(total)
        task = run_beside(
            platform.device_of(total),
            lambda async_op: collectives.all_reduce(total, self.group, out=total, async_op=async_op),
            total,
        )

        def wait() -> Tensor:
            task.wait()
            return total

        return total, wait

    def recorded(self, g: Tensor) -> Tensor:
        return conversions.all_reduce(g, self.group)


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Of pieces that were gathered: one reduce-scatter."""

    cut: Cut

    def whole(self, x: Tensor) -> Tensor:
        return transport.gather(x, self.cut)

    def start(self, g: Tensor, *, is_ours: bool) -> tuple[Tensor, Callable[[], Tensor]]:
        platform, cut = get_platform(), self.cut
        rows = Matrices.of(tuple(g.shape), cut)
        wait = reduce_beside(rows.flat(g), rows)
        # Nobody reads what stands for the piece until that is there.
        return platform.narrow(g, cut.dim, 0, cut.sizes[cut.index]), lambda: rows.piece(wait())

    def recorded(self, g: Tensor) -> Tensor:
        return conversions.reduce_scatter(g, self.cut)


# -------------------------------------------------------------------------------------------------------------------- nodes
@once
def _functions(platform: Any) -> SimpleNamespace:
    """The autograd Functions of the framework, for local tensors."""
    base: Any = platform.TraceableFunction

    def as_matrix(x: Tensor) -> Tensor:
        return platform.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))

    class Waits(base):
        @staticmethod
        def forward(ctx: Any, x: Tensor, under_way: list[Callable[[], Tensor]]) -> Tensor:
            ctx.under_way = under_way
            return platform.detach(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
            if ctx.under_way:  # else it is recorded, and has waited
                g = ctx.under_way.pop()()
            return g, None

    class Starts(base):
        @staticmethod
        def forward(
            ctx: Any,
            x: Tensor,
            reduction: _Reduction,
            under_way: list[Callable[[], Tensor]],
            behind: _Behind,
            used: Used,
        ) -> Tensor:
            ctx.reduction, ctx.under_way, ctx.behind, ctx.used = reduction, under_way, behind, used
            return reduction.whole(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
            if ctx.used is not None:
                ctx.used()
            while ctx.under_way:  # a backward that failed has left it
                ctx.under_way.pop()()
            if platform.is_grad_enabled():
                return ctx.reduction.recorded(g), None, None, None, None
            stands_for, wait = ctx.reduction.start(g, is_ours=ctx.behind.is_for_products)
            ctx.under_way.append(wait)
            return stands_for, None, None, None, None

    class OfWeight(base):
        """``linear`` for the gradients of weight and bias."""

        @staticmethod
        def forward(ctx: Any, weight: Tensor, bias: Tensor | None, operands: tuple[Tensor]) -> Tensor:
            ctx.save_for_backward(*operands)
            return platform.linear(operands[0], weight, bias)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
            (x,), (needs_weight, needs_bias, _) = ctx.saved_tensors, ctx.needs_input_grad
            g = as_matrix(g)
            to_weight = platform.matmul(platform.transpose(g, 0, 1), as_matrix(x)) if needs_weight else None
            return to_weight, platform.sum(g, 0) if needs_bias else None, None

    class OfInput(base):
        """What :class:`OfWeight` computed, for the gradient of the input."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor, operands: tuple[Tensor]) -> Tensor:
            ctx.save_for_backward(*operands)
            return platform.detach(y)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
            (weight,) = ctx.saved_tensors
            if not ctx.needs_input_grad[0]:
                return None, g, None
            product = platform.matmul(as_matrix(g), weight)
            return platform.reshape(product, (*g.shape[:-1], weight.shape[1])), g, None

    return SimpleNamespace(Waits=Waits, Starts=Starts, OfWeight=OfWeight, OfInput=OfInput)
