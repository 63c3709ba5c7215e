"""Attention."""

from __future__ import annotations

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops

from hp_dtensor._mindspore.composed.arithmetic import constant, scaled
from hp_platform import get_platform


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``softmax(scale q k^T) v`` of (batch, heads, length, size), where ``mask`` is true; causal: key <= query."""
    platform = get_platform()
    if enable_gqa:
        k, v = (_repeated(x, q.shape[1] // x.shape[1]) for x in (k, v))
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else scale
    scores = scaled(platform.matmul(q, platform.transpose(k, -2, -1)), scale)
    if is_causal:
        mask = mindspore.Tensor(np.tri(q.shape[-2], k.shape[-2], dtype=np.bool_))
    if mask is not None:
        scores = platform.where(mask, scores, constant(float("-inf"), scores))
    found: Tensor = platform.matmul(platform.softmax(scores, -1), v)
    return found


def _repeated(x: Tensor, times: int) -> Tensor:
    """Each head several times, one after the other."""
    batch, heads, length, size = x.shape
    each = ops.broadcast_to(mint.unsqueeze(x, 2), (batch, heads, times, length, size))
    return each.reshape((batch, heads * times, length, size))
