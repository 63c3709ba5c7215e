"""What functions give where an operand has no elements, without trusting MindSpore's kernels.

[Note: empty operands] On CPU a sum over no elements, and a product that contracts none, leave their result as the memory was.
The gradient of a product without rows ends the backward, as do that of an embedding of no ids and the second one of softmax.
So such a result is made here: a constant, from which zeros flow back to every operand, also in a second backward. Operators
(``x @ y``, ``x * y``) do not pass here: see :mod:`hp_platform.protocols.tensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import mindspore
from mindspore import mint
from mindspore.mint.nn import functional

from hp_platform.mindspore._autograd import Function
from hp_platform.mindspore._private import executor, requires_grad
from hp_platform.mindspore._recording import no_grad
from hp_platform.mindspore._write import exact_number, write


def constant_if_empty(function: Callable[..., Any], value: float = 0.0) -> Callable[..., Any]:
    """``function``, but where an operand is empty, its result (of the shape and dtype that it has) is filled with ``value``."""

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(x, mindspore.Tensor) and 0 in x.shape:
                return _constant(function, value, args, kwargs)
        return function(*args, **kwargs)

    return guarded


def _constant(function: Callable[..., Any], value: float, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, mindspore.Tensor)]
    if any(hasattr(x, "__fallback__") or hasattr(x, "__ms_dispatch__") for x in tensors):
        return function(*args, **kwargs)  # a tensor that wraps others, and catches functions itself
    with no_grad():
        like = function(*args, **kwargs)
    return _filled(like, value, [x for x in tensors if requires_grad(x)])


def _filled(like: mindspore.Tensor, value: float, inputs: Sequence[mindspore.Tensor]) -> mindspore.Tensor:
    """A constant like ``like``, computed from ``inputs`` as far as gradients go: each gets zeros."""
    if inputs and executor.enable_grad():
        filled: mindspore.Tensor = _Filled.apply(like, value, *inputs)
        return filled
    made = mint.empty(tuple(like.shape), dtype=like.dtype, device=like.device)
    write(made, exact_number(value, made.dtype))
    return made


class _Filled(Function):
    """Its backward is made of itself, from the gradient and the inputs, as that of a product is: a second one passes here, too."""

    @staticmethod
    def forward(ctx: Any, like: mindspore.Tensor, value: float, *inputs: mindspore.Tensor) -> Any:
        ctx.kinds = [(tuple(x.shape), x.dtype, x.device) for x in inputs]
        ctx.save_for_backward(*inputs)
        return _filled(like, value, ())

    @staticmethod
    def backward(ctx: Any, g: mindspore.Tensor) -> Any:
        behind = [x for x in (g, *ctx.saved_tensors) if requires_grad(x)]
        likes = [mint.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.kinds]
        return None, None, *(_filled(like, 0.0, behind) for like in likes)


_product = constant_if_empty(functional.linear)


def linear(x: mindspore.Tensor, weight: mindspore.Tensor, bias: mindspore.Tensor | None = None) -> Any:
    """``x @ weight.T + bias``. With nothing to contract the bias is what remains, and its gradient is not zero."""
    if bias is None:
        return _product(x, weight)
    if x.shape[-1:] == (0,) and 0 not in (*x.shape[:-1], *weight.shape[:-1]):
        return _product(x, weight) + bias
    return _product(x, weight, bias)
