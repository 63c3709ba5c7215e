"""Means and variances of a batch that is cut: batch norm while training, and the running statistics of batch and instance norm.

Two passes, as for variances (:mod:`hp_dtensor.rules.moments`): the mean first, then the squares of the distances from it. Each
costs one all-reduce of a number per channel and mesh dim that cuts, forward and backward. How many elements every rank has is
known from the chunk rule, so uneven and empty pieces count as much as they hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hp_dtensor import across
from hp_dtensor.rules.reduction import local_sum
from hp_dtensor.spec import Spec
from hp_platform import get_platform

Tensor = Any


def batch_normed(
    local: Tensor,
    x: Spec,
    mesh_dims: Sequence[int],
    running: tuple[Tensor | None, Tensor | None],
    scale: tuple[Tensor | None, Tensor | None],
    momentum: float,
    eps: float,
) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` per channel (dim 1), the statistics of the whole; writes ``running``.

    ``local`` is this rank's piece of ``x``, cut along ``mesh_dims``; half precision is computed in float32.
    """
    platform = get_platform()
    dims = tuple(d for d in range(len(x.shape)) if d != 1)
    count = math.prod(x.shape[d] for d in dims)
    dtype = local.dtype
    wide = platform.cast(local, "float32") if platform.dtype_name(dtype) in _HALVES else local
    mean = across.total(local_sum(wide, dims, True) / count, x, mesh_dims)
    distance = wide - across.used_differently(mean, x, mesh_dims)
    var = across.total(local_sum(distance * distance, dims, True) / count, x, mesh_dims)
    update(running, mean, var * (count / max(1, count - 1)), momentum)
    y = distance / platform.sqrt(across.used_differently(var, x, mesh_dims) + eps)
    weight, bias = (_per_channel(vector, y) for vector in scale)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return platform.cast(y, dtype) if y.dtype != dtype else y


_HALVES = frozenset({"float16", "bfloat16"})


def _per_channel(vector: Tensor | None, like: Tensor) -> Tensor | None:
    if vector is None:
        return None
    platform = get_platform()
    shape = (1, -1, *(1 for _ in range(like.ndim - 2)))
    return platform.reshape(platform.cast(vector, like.dtype), shape)


def update(running: Sequence[Tensor | None], mean: Tensor, var: Tensor, momentum: float) -> None:
    """Move running statistics towards those of a batch, the same on all ranks; outside of the graph."""
    platform = get_platform()
    with platform.no_grad():
        for own, new in zip(running, (mean, var), strict=True):
            if own is not None:
                value = platform.reshape(platform.detach(new), tuple(own.shape))
                platform.copy_(own, own * (1 - momentum) + platform.cast(value, own.dtype) * momentum)


def update_by_instances(
    local: Tensor, x: Spec, mesh_dims: Sequence[int], running: Sequence[Tensor | None], momentum: float
) -> None:
    """The running statistics of instance norm: means over the batch of every sample's own. One all-reduce of both per mesh dim."""
    platform = get_platform()
    dims = tuple(range(2, len(x.shape)))
    count = math.prod(x.shape[2:])
    with platform.no_grad():
        own = platform.detach(local)
        own = platform.cast(own, "float32") if platform.dtype_name(own.dtype) in _HALVES else own
        mean = local_sum(own, dims, True) / count
        distance = own - mean
        var = local_sum(distance * distance, dims, True) / max(1, count - 1)
        sums = [local_sum(statistic, (0, *dims), False) / max(1, x.shape[0]) for statistic in (mean, var)]
        both = across.reduced(platform.cat(sums, 0), x, mesh_dims, "sum")
        size = sums[0].shape[0]
        update(running, platform.narrow(both, 0, 0, size), platform.narrow(both, 0, size, size), momentum)
