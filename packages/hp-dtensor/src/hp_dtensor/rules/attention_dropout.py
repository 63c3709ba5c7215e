"""Attention whose probabilities are dropped: written out, since a fused kernel's mask depends on how the heads are cut.

The mask is that of :mod:`hp_dtensor.rng.dropout` for the probabilities as one tensor (batch, heads, queries, keys), of which
each rank draws what it holds. So the probabilities of this rank exist for a while, which the fused kernel saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor.rng.dropout import drop_local
from hp_platform import get_platform
from hp_platform.draws import Region

Tensor = Any


def dropped_attention(
    p: float, scores: Sequence[int], offset: Sequence[int], prepare: Callable[[list[Any]], list[Any]] | None
) -> Callable[..., Tensor]:
    """What runs in the place of the fused kernel, on local arguments.

    ``scores``: the global shape of the probabilities; ``offset``: where this rank's result begins, whose last dim is whole.
    """

    def run(*local: Any, **named: Any) -> Tensor:
        q, k, v, *rest = list(local) if prepare is None else prepare(list(local))
        mask = rest[0] if rest else None
        is_causal = len(rest) > 2 and rest[2]
        return _attention(q, k, v, mask, is_causal, p, tuple(scores), (*offset[:-1], 0), **named)

    return run


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    p: float,
    whole: tuple[int, ...],
    offset: tuple[int, ...],
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    platform = get_platform()
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    groups = k.shape[-3] if enable_gqa and q.shape[-3] != k.shape[-3] else 0
    if groups:
        q, k, v = (_grouped(x, groups) for x in (q, k, v))
    scaled = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    found = platform.matmul(scaled, platform.transpose(k, k.ndim - 2, k.ndim - 1))
    if is_causal:
        device = platform.device_of(q)
        rows = platform.reshape(platform.arange(0, num_queries, device=device), (-1, 1))
        mask = platform.arange(0, num_keys, device=device) <= rows
    if mask is not None and groups and mask.ndim > 2:
        of_heads = groups if mask.shape[-3] > 1 else 1
        mask = _grouped(mask, of_heads)
    is_choice = mask is not None and platform.dtype_name(mask.dtype) == "bool"
    if is_choice:
        never = platform.full((), float("-inf"), found.dtype, platform.device_of(found))
        found = platform.where(mask, found, never)
    elif mask is not None:
        found = found + mask
    found = platform.softmax(found, -1)
    if is_choice:  # of a query that sees nothing
        found = platform.where(mask, found, platform.zeros_like(found))
    if groups:
        # (..., groups, heads of a group, queries, keys) as (..., heads, queries, keys)
        found = platform.reshape(found, (*found.shape[:-4], groups * found.shape[-3], *found.shape[-2:]))
    found = drop_local(found, Region(whole, offset, tuple(found.shape)), p, None)
    if not groups:
        return platform.matmul(found, v)
    result = platform.matmul(_grouped(found, groups), v)
    return platform.reshape(result, (*result.shape[:-4], groups * result.shape[-3], *result.shape[-2:]))


def _grouped(x: Tensor, groups: int) -> Tensor:
    """``(..., heads, n, m)`` as ``(..., groups, heads of a group, n, m)``."""
    return get_platform().reshape(x, (*x.shape[:-3], groups, x.shape[-3] // groups, *x.shape[-2:]))
