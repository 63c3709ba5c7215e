"""Operations that MindSpore's CPU build has no kernel for, composed of those that it has. Each is tested against numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import mint, ops
from mindspore.mint.nn import functional

from hp_platform.mindspore._dtypes import NAME_OF, resolve
from hp_platform.mindspore._empty import constant_if_empty
from hp_platform.mindspore._matmul import matmul
from hp_platform.mindspore._recording import no_grad
from hp_platform.mindspore._write import exact_number

softmax = constant_if_empty(functional.softmax)


@constant_if_empty
def where(condition: mindspore.Tensor, x: mindspore.Tensor, y: mindspore.Tensor) -> mindspore.Tensor:
    """Elementwise choice. Of bfloat16 in float32, which holds each of its values exactly."""
    if x.dtype == mindspore.bfloat16 and y.dtype == mindspore.bfloat16:
        chosen = mint.where(condition, x.astype(mindspore.float32), y.astype(mindspore.float32))
        return chosen.astype(mindspore.bfloat16)
    return mint.where(condition, x, y)


@constant_if_empty
def embedding(ids: mindspore.Tensor, weight: mindspore.Tensor) -> mindspore.Tensor:
    """Rows of ``weight`` at ``ids``; the gradient of a row is the sum over its uses."""
    return ops.gather(weight, ids, 0)


@constant_if_empty
def take_along(x: mindspore.Tensor, dim: int, index: mindspore.Tensor) -> mindspore.Tensor:
    """``x`` at ``index`` along ``dim``."""
    return mint.gather(x, dim, index.astype(mindspore.int64))


@constant_if_empty
def amax(x: mindspore.Tensor, dim: int, keepdim: bool) -> mindspore.Tensor:
    """Largest along a dim; NaN wins, which MindSpore's own kernel forgets in some places."""
    largest = mint.amax(x, dim, keepdim)
    is_nan = mint.sum((x != x).astype(mindspore.int32), dim, keepdim) > 0
    return mint.where(is_nan, mindspore.Tensor(np.array(np.nan, NAME_OF[x.dtype])), largest)


def norms(xs: Sequence[mindspore.Tensor], p: float, dtype: Any) -> mindspore.Tensor:
    """The p-norm of each, as one vector."""
    wanted = resolve(dtype)
    with no_grad():
        return mint.cat([_norm(x.astype(wanted).reshape((-1,)), float(p)).reshape((1,)) for x in xs])


def _norm(x: mindspore.Tensor, p: float) -> mindspore.Tensor:
    if 0 in x.shape:
        return exact_number(math.inf if p < 0 else 0.0, x.dtype)
    if p == 0:
        return mint.sum((x != 0).astype(x.dtype), 0)
    if p == 2:
        return mint.sqrt(mint.sum(x * x, 0))
    size = mint.abs(x)
    if p == math.inf:
        return amax(size, 0, False)
    if p == -math.inf:
        return -amax(-size, 0, False)
    if p == 1:
        return mint.sum(size, 0)
    # The exponents as tensors: a number would be rounded to float32.
    return mint.pow(mint.sum(mint.pow(size, exact_number(p, x.dtype)), 0), exact_number(1 / p, x.dtype))


@constant_if_empty
def placed_along(
    x: mindspore.Tensor, dim: int, index: mindspore.Tensor, values: mindspore.Tensor
) -> mindspore.Tensor:
    """``values`` at ``index`` along ``dim`` among zeros, in the shape of ``x``."""
    shape = [1] * x.ndim
    shape[dim] = x.shape[dim]
    places = mindspore.Tensor(np.arange(x.shape[dim]).reshape(shape))
    return mint.where(places == index, values.astype(x.dtype), ops.zeros_like(x))


def gelu(x: mindspore.Tensor) -> mindspore.Tensor:
    """``x Phi(x)`` with the normal distribution's Phi."""
    return ops.gelu(x, approximate="none")


def cross_entropy(logits: mindspore.Tensor, target: mindspore.Tensor) -> mindspore.Tensor:
    """Mean over rows of ``log sum exp(logits) - logits[target]``.

    Not with MindSpore's own ``log_softmax``, which computes in float32 also for float64.
    """
    if logits.ndim != 2 or target.shape != logits.shape[:1]:
        raise ValueError(
            f"cross_entropy takes logits (rows, classes) and target (rows,), got shapes {tuple(logits.shape)} and "
            f"{tuple(target.shape)}"
        )
    # The largest logit cancels in the result; as a constant it must not appear in the gradient either.
    shifted = logits - ops.stop_gradient(mint.amax(logits, 1, keepdim=True))
    chosen = mint.gather(shifted, 1, target.astype(mindspore.int64).reshape((-1, 1)))
    return mint.mean(mint.log(mint.sum(mint.exp(shifted), 1)) - chosen.reshape((-1,)))


def scaled_dot_product_attention(
    q: mindspore.Tensor, k: mindspore.Tensor, v: mindspore.Tensor, *, is_causal: bool = False
) -> mindspore.Tensor:
    """``softmax(q k^T / sqrt(head_dim)) v``; causal: query i sees keys 0 ... i."""
    scale = mindspore.Tensor(np.array(max(q.shape[-1], 1) ** -0.5, NAME_OF[q.dtype]))
    scores = matmul(q, mint.transpose(k, -2, -1)) * scale
    if is_causal:
        seen = mindspore.Tensor(np.tri(q.shape[-2], k.shape[-2], dtype=np.bool_))
        scores = mint.where(seen, scores, mindspore.Tensor(np.array(-np.inf, NAME_OF[q.dtype])))
    return matmul(softmax(scores, dim=-1), v)
