"""Weight gradients of linear layers that come in the dtype of the reduction, straight from the product that makes them.

[Note: wide weight gradients] Computed as everything else is, a weight's gradient is rounded to the dtype of the computation, and
the reduction then converts it again: one more pass over all gradients. The product of gradients and inputs adds up in float32
anyway; kept so, it costs the same time, rounds once less, and is sent as it is. To get there, the weight that a module shows
takes the framework's ``linear`` into its own hands; every other use of it is the usual one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_platform.on_platform import once
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import DType, Tensor

Add = Callable[[Tensor], None]


class WideGradient:
    """Of one parameter: what the running backward has given in the dtype of the reduction, beside what autograd adds up."""

    __slots__ = ("_offered", "_platform", "_total")

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._offered: Tensor | None = None
        """Until autograd says that this backward is one for the parameter (and not for the inputs only)."""
        self._total: Tensor | None = None

    def offer(self, gradient: Tensor) -> None:
        """One more, from a product."""
        with self._platform.no_grad():
            offered = self._offered
            self._offered = gradient if offered is None else self._platform.add_(offered, gradient)

    def accept(self) -> None:
        """What was offered counts."""
        offered, self._offered = self._offered, None
        if offered is None:
            return
        with self._platform.no_grad():
            total = self._total
            self._total = offered if total is None else self._platform.add_(total, offered)

    def take(self) -> Tensor | None:
        """What counts; it is forgotten, and so is what was offered."""
        total = self._total
        self._total = self._offered = None
        return total


def wide_weight(platform: Platform, weight: Tensor, dtype: DType, add: Add) -> Tensor:
    """What stands for the whole ``weight`` ``(out, in)``: ``linear`` with it calls ``add(gradient)`` in backward, in ``dtype``.

    Needs the capability ``stand_ins``. First derivatives only: RuntimeError in a backward that records (``create_graph``).
    """

    def linear(x: Tensor, bias: Tensor | None) -> Tensor:
        recorded = platform.is_grad_enabled() and platform.requires_grad(weight)
        if not recorded or x.dtype != weight.dtype:
            return platform.linear(x, weight, bias)
        return _linear_class().apply(x, weight, bias, dtype, add)

    return platform.stand_in(
        tuple(weight.shape), weight.dtype, platform.device_of(weight), lambda: weight, linear
    )


@once
def _linear_class(platform: Platform) -> Any:
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: DType, add: Add) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.dtype, ctx.add = bias is not None, dtype, add
        return platform.linear(x, weight, bias)

    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if platform.is_grad_enabled():
            raise RuntimeError(
                "weight_grads_in_reduce_dtype gives first derivatives only: leave it False in the MixedPrecisionPolicy of a model "
                "that is differentiated twice"
            )
        x, weight = ctx.saved_tensors
        rows = platform.reshape(gradient, (-1, gradient.shape[-1]))
        inputs = platform.reshape(x, (-1, x.shape[-1]))
        ctx.add(platform.matmul_in(platform.transpose(rows, 0, 1), inputs, ctx.dtype))
        needs_input = ctx.needs_input_grad
        to_inputs = platform.matmul(gradient, weight) if needs_input[0] else None
        to_bias = platform.sum(rows, 0) if ctx.has_bias and needs_input[2] else None
        # The weight's own gradient has been given already.
        return to_inputs, None, to_bias, None, None

    parts = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("LinearWithWideGradient", (platform.Function,), parts)
