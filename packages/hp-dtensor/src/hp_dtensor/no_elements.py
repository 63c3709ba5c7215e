"""Operations on empty pieces: what they give and what flows back, without asking the framework's kernels.

[Note: empty pieces] Where a dim is shorter than its mesh dim, some ranks hold nothing. Their backward must still reach every
mark behind the operation, since the other ranks wait there. Frameworks are not reliable here: MindSpore's sum over no
elements leaves memory as it was, and the gradient of a product with no rows ends the backward.

[Note: derivatives of every order] How a gradient is computed depends on the piece: that of an operation on elements depends on
its inputs, zeros do not, nor do some gradients of torch's where a piece has one element or two zeros (prod, cumprod). When
that gradient is differentiated itself, one rank would walk to the collectives behind the inputs, and the other not. So where
pieces may differ so, *all* ranks let the gradient depend on all inputs, by zeros: :func:`meeting`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from hp_dtensor.nest import leaves, rebuilt
from hp_platform import get_platform
from hp_platform.on_platform import once

Tensor = Any


def without_elements(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The operation ``run`` where its local result has no elements: the gradient of every input is zeros."""

    def run_empty(*args: Any, **kwargs: Any) -> Tensor:
        with get_platform().no_grad():
            result = run(*args, **kwargs)
        return zeros_from(result, args)

    return run_empty


def zeros_from(like: Tensor, inputs: Sequence[Any]) -> Tensor:
    """Zeros like ``like``, computed from ``inputs`` as far as gradients go: each gets zeros. Tensors may stand in lists."""
    platform: Any = get_platform()
    tensors = _recorded(inputs)
    if not (tensors and has_gradients(like) and platform.is_grad_enabled()):
        return platform.zeros_like(like)
    return _functions().ZerosFrom.apply(like, *tensors)


def _recorded(inputs: Sequence[Any]) -> list[Tensor]:
    """Those that ask for a gradient, also in lists."""
    platform: Any = get_platform()
    return [x for x in leaves(list(inputs)) if platform.is_tensor(x) and platform.requires_grad(x)]


def meeting(result: Any, inputs: Sequence[Any]) -> Any:
    """``result``, whose gradient depends on all ``inputs``, at every order. See [Note: derivatives of every order].

    Tensors among ``inputs`` may stand in lists; ``result`` may be several. Itself where no gradient is recorded.
    """
    platform: Any = get_platform()
    if not platform.is_grad_enabled():
        return result
    tensors = _recorded(inputs)
    if not tensors:
        return result
    if isinstance(result, (list, tuple)):
        return rebuilt(result, [_met(x, tensors) for x in result])
    return _met(result, tensors)


def _met(x: Any, tensors: Sequence[Tensor]) -> Any:
    platform: Any = get_platform()
    if not (platform.is_tensor(x) and has_gradients(x)):
        return x
    return _functions().Meeting.apply(x, *tensors)


def has_gradients(x: Tensor) -> bool:
    """Whether numbers of this dtype may have some."""
    return get_platform().is_floating(x.dtype) or is_complex(x)


def is_complex(x: Tensor) -> bool:
    """Whether these are complex numbers."""
    return bool(get_platform().dtype_name(x.dtype).startswith("complex"))


@once
def _functions(platform: Any) -> SimpleNamespace:
    class ZerosFrom(platform.Function):
        @staticmethod
        def forward(ctx: Any, like: Tensor, *inputs: Tensor) -> Tensor:
            ctx.inputs = [(tuple(x.shape), x.dtype, platform.device_of(x)) for x in inputs]
            return platform.zeros_like(like)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            zeros = (platform.zeros(shape, dtype, device) for shape, dtype, device in ctx.inputs)
            # Computed from g, so that a second backward passes here, too.
            return None, *(ZerosFrom.apply(like, g) for like in zeros)

    class Meeting(platform.Function):
        """The identity of the first tensor; the gradients of the others are zeros. All of them depend on all tensors."""

        @staticmethod
        def forward(ctx: Any, y: Tensor, *others: Tensor) -> Tensor:
            ctx.others = others
            return platform.detach(y)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            zeros = [platform.zeros_like(platform.detach(x)) for x in ctx.others]
            if platform.is_grad_enabled():
                g = Meeting.apply(g, *ctx.others)
                zeros = [zeros_from(x, [g]) for x in zeros]
            return g, *zeros

    return SimpleNamespace(ZerosFrom=ZerosFrom, Meeting=Meeting)
