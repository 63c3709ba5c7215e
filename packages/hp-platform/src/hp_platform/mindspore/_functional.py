"""Functional operations of MindSpore: layers without parameters of their own, and reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import mindspore
from mindspore import mint, ops
from mindspore.mint.nn import functional

from hp_platform.mindspore import _composed, _empty, _matmul
from hp_platform.mindspore._dtypes import resolve
from hp_platform.mindspore._empty import constant_if_empty
from hp_platform.mindspore._recording import no_grad


def _computing(function: Callable[..., Any]) -> Any:
    """Refuse bfloat16 at the call: MindSpore's CPU build has no kernels for it and says so much later, at another tensor."""

    @wraps(function)
    def checked(x: mindspore.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dtype == mindspore.bfloat16 and mindspore.get_current_device()[0] == "CPU":
            raise NotImplementedError(
                f"{function.__name__} in bfloat16: MindSpore {mindspore.__version__} has no such kernel on cpu; "
                "cast to float16 or float32"
            )
        return function(x, *args, **kwargs)

    return staticmethod(checked)


class MindSporeFunctionalOps:
    """Implements what :class:`hp_platform.protocols.NNOps` computes."""

    linear = _computing(_empty.linear)
    matmul = _computing(_matmul.matmul)
    silu = _computing(functional.silu)
    relu = _computing(constant_if_empty(functional.relu))
    gelu = _computing(_composed.gelu)
    rsqrt = _computing(mint.rsqrt)
    sqrt = _computing(mint.sqrt)
    exp = _computing(mint.exp)
    log = _computing(mint.log)
    cos = _computing(mint.cos)
    sin = _computing(mint.sin)
    cross_entropy = _computing(constant_if_empty(_composed.cross_entropy, math.nan))
    scaled_dot_product_attention = _computing(_composed.scaled_dot_product_attention)

    def embedding(self, ids: mindspore.Tensor, weight: mindspore.Tensor) -> mindspore.Tensor:
        """Rows of ``weight``."""
        return _rows(weight, ids)

    def matmul_in(self, x: mindspore.Tensor, y: mindspore.Tensor, dtype: Any) -> mindspore.Tensor:
        """A product in a wider dtype."""
        wanted = resolve(dtype)
        x, y = ops.stop_gradient(x), ops.stop_gradient(y)
        return _matmul.matmul(x.astype(wanted), y.astype(wanted))

    def product_dtype(self, x: mindspore.Tensor) -> Any:
        """Nothing is cast behind the program."""
        return x.dtype

    matmul_into = staticmethod(_matmul.matmul_into)

    def norm(
        self, x: mindspore.Tensor, dim: int | Sequence[int], keepdim: bool = False, dtype: Any = None
    ) -> mindspore.Tensor:
        """2-norm over dims."""
        with no_grad():
            wide = x if dtype is None else x.astype(resolve(dtype))
            return mint.sqrt(_sum(wide * wide, _dims(x, dim), keepdim))

    def softmax(self, x: mindspore.Tensor, dim: int = -1) -> mindspore.Tensor:
        """Softmax along a dim."""
        return _softmax(x, dim)

    def sum(
        self, x: mindspore.Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False
    ) -> mindspore.Tensor:
        """Sum over dims."""
        return _sum(x, _dims(x, dim), keepdim)

    def mean(
        self, x: mindspore.Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False
    ) -> mindspore.Tensor:
        """Mean over dims."""
        return _mean(x, _dims(x, dim), keepdim)


def _dims(x: mindspore.Tensor, dim: int | Sequence[int] | None) -> int | tuple[int, ...]:
    if dim is None:
        return tuple(range(x.ndim))
    return dim if isinstance(dim, int) else tuple(dim)


_sum = _computing(constant_if_empty(mint.sum))
_mean = _computing(constant_if_empty(mint.mean, math.nan))
_softmax = _computing(_composed.softmax)
_rows = _computing(lambda weight, ids: _composed.embedding(ids, weight))
