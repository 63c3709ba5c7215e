"""Slices added at places."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, mint, ops

from hp_dtensor._mindspore.composed.arithmetic import scaled
from hp_platform import get_platform


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: Any = 1) -> Tensor:
    """``x[index[i]] += alpha * source[i]`` along ``dim``, in a copy. Numbers that come twice count twice."""
    values = scaled(source, alpha)
    if 0 in values.shape:  # kernels refuse to write nothing; the sum of nothing keeps the gradient's way
        return x + get_platform().sum(values)
    if x.ndim == 0:
        return x + get_platform().sum(values)
    at = index.reshape(tuple(-1 if d == dim % x.ndim else 1 for d in range(x.ndim)))
    return ops.tensor_scatter_elements(x, mint.broadcast_to(at, values.shape), values, dim, "add")
