"""Operations along a dim."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Tensor, mint, ops

from hp_dtensor._mindspore.composed.arithmetic import constant
from hp_platform import get_platform


def topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, is_sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """Values and places."""
    values, places = ops.topk(x, k, dim, largest, is_sorted)
    return values, places.astype(mindspore.int64)


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Values and places."""
    values, places = ops.sort(x, dim, descending)
    return values, places.astype(mindspore.int64)


def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Place of the first largest."""
    return _place(ops.argmax, x, dim, keepdim)


def argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Place of the first smallest."""
    return _place(ops.argmin, x, dim, keepdim)


def _place(function: Any, x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    if dim is None:
        return function(x.reshape((-1,)), 0).astype(mindspore.int64)
    found = function(x, dim).astype(mindspore.int64)
    return mint.unsqueeze(found, dim) if keepdim else found


def logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """The logarithm of the sum of exponentials."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim) or tuple(range(x.ndim))
    base = ops.stop_gradient(ops.amax(x, dims, keepdims=True))
    base = mint.where(mint.isfinite(base), base, ops.zeros_like(base))
    found = mint.log(get_platform().sum(mint.exp(x - base), dims, keepdim=True)) + base
    return (
        found
        if keepdim
        else found.reshape(tuple(n for i, n in enumerate(x.shape) if i not in _all(dims, x.ndim)))
    )


def cumprod(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """Products of all before and itself, whose gradient is right where elements are 0.

    MindSpore's own gradient divides by the elements: NaN and infinities there, on every device. With a gradient the products
    are those of pairs, pairs of pairs and so on (Hillis and Steele, 1986), whose gradients only multiply.
    """
    platform = get_platform()
    if not (platform.is_grad_enabled() and platform.requires_grad(x)):
        return ops.cumprod(x, dim, dtype)
    y = x if dtype is None else x.astype(dtype)
    dim, step, n = dim % x.ndim, 1, x.shape[dim]
    while step < n:
        pairs = platform.narrow(y, dim, step, n - step) * platform.narrow(y, dim, 0, n - step)
        y, step = platform.cat([platform.narrow(y, dim, 0, step), pairs], dim), 2 * step
    return y


def moment(x: Tensor, dim: Any, correction: float, keepdim: bool, is_root: bool) -> Tensor:
    """Variance or standard deviation over dims (None: all)."""
    platform = get_platform()
    dims = tuple(range(x.ndim)) if dim is None else _all((dim,) if isinstance(dim, int) else dim, x.ndim)
    count = 1
    for d in dims:
        count = count * x.shape[d]
    centred = x - platform.mean(x, dims, keepdim=True)
    var = platform.sum(centred * centred, dims, keepdim) / constant(max(count - correction, 0), x)
    return mint.sqrt(var) if is_root else var


def vector_norm(x: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False) -> Tensor:
    """``sum(|x|^order)^(1 / order)``, the extremes for infinities, the number of what is not 0 for 0."""
    dims = tuple(range(x.ndim)) if dim is None else _all((dim,) if isinstance(dim, int) else dim, x.ndim)
    size, platform = mint.abs(x), get_platform()
    if order in (float("inf"), float("-inf")):
        return (ops.amax if order > 0 else ops.amin)(size, dims, keepdims=keepdim)
    if order == 0:
        return platform.sum((x != 0).astype(x.dtype), dims, keepdim)
    if order == 1:
        return platform.sum(size, dims, keepdim)
    if order == 2:
        return mint.sqrt(platform.sum(x * x, dims, keepdim))
    return platform.sum(size ** constant(order, x), dims, keepdim) ** constant(1 / order, x)


def _all(dims: Any, ndim: int) -> tuple[int, ...]:
    return tuple(d % ndim for d in dims)
