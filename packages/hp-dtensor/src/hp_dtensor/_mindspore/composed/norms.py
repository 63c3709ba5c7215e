"""Normalisations."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, mint

from hp_dtensor._mindspore.composed.arithmetic import constant
from hp_dtensor.rules.batch_statistics import update
from hp_platform import get_platform


def _scaled_and_shifted(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = x if weight is None else x * weight
    return scaled if bias is None else scaled + bias


def _dims(x: Tensor, normalized_shape: Any) -> tuple[int, ...]:
    count = 1 if isinstance(normalized_shape, int) else len(normalized_shape)
    return tuple(range(x.ndim - count, x.ndim))


def layer_norm(
    x: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``(x - mean) / sqrt(var + eps)`` over the last dims, times weight, plus bias."""
    platform, dims = get_platform(), _dims(x, normalized_shape)
    centred = x - platform.mean(x, dims, keepdim=True)
    var = platform.mean(centred * centred, dims, keepdim=True)
    return _scaled_and_shifted(centred * mint.rsqrt(var + constant(eps, x)), weight, bias)


def rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last dims, times weight."""
    square = get_platform().mean(x * x, _dims(x, normalized_shape), keepdim=True)
    return _scaled_and_shifted(x * mint.rsqrt(square + constant(eps, x)), weight, None)


def batch_norm(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """With the running statistics, or for ``training`` with those of the batch, towards which the running ones move."""
    platform = get_platform()
    shape = (-1, *(1 for _ in range(x.ndim - 2)))
    of_channels = [None if vector is None else vector.reshape(shape) for vector in (weight, bias)]
    if not training:
        centred = (x - mean.reshape(shape)) * mint.rsqrt(var.reshape(shape) + constant(eps, x))
        return _scaled_and_shifted(centred, *of_channels)
    dims = tuple(d for d in range(x.ndim) if d != 1)
    count = x.size // x.shape[1]
    own_mean = platform.mean(x, dims, keepdim=True)
    centred = x - own_mean
    own_var = platform.mean(centred * centred, dims, keepdim=True)
    update((mean, var), own_mean, own_var * constant(count / max(1, count - 1), x), momentum)
    return _scaled_and_shifted(centred * mint.rsqrt(own_var + constant(eps, x)), *of_channels)
