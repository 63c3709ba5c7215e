"""Convolutions: a sum of matrix products, one for each place of the kernel."""

from __future__ import annotations

import itertools
from typing import Any

from mindspore import Tensor, mint, ops

from hp_platform import get_platform


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Of x (n, in, places) or (in, places) and weight (out, in / groups, kernel), with as many places as the kernel has dims."""
    count = weight.ndim - 2
    if x.ndim == count + 1:
        return convolution(mint.unsqueeze(x, 0), weight, bias, stride, padding, dilation, groups)[0]
    steps, far = _each(stride, count), _each(dilation, count)
    kernel = tuple(weight.shape[2:])
    x = _padded(x, padding, [d * (k - 1) for d, k in zip(far, kernel, strict=True)])
    sizes = [
        (n - d * (k - 1) - 1) // step + 1
        for n, k, step, d in zip(x.shape[2:], kernel, steps, far, strict=True)
    ]
    batch, channels, out, num_places = x.shape[0], x.shape[1], weight.shape[0], 1
    for size in sizes:
        num_places = num_places * size
    factors = weight.reshape((1, groups, out // groups, channels // groups, -1))
    total = None
    for number, place in enumerate(itertools.product(*map(range, kernel))):
        seen = x
        for dim, (i, d, size, step) in enumerate(zip(place, far, sizes, steps, strict=True), 2):
            seen = _every(seen, dim, i * d, size, step)
        seen = seen.reshape((batch, groups, channels // groups, num_places))
        product = get_platform().matmul(factors[..., number], seen)
        total = product if total is None else total + product
    assert total is not None, "a kernel has a place"
    y = total.reshape((batch, out, *sizes))
    return y if bias is None else y + bias.reshape((1, -1, *(1 for _ in sizes)))


def _every(x: Tensor, dim: int, first: int, size: int, step: int) -> Tensor:
    """Each ``step``-th place of a dim. The gradient of a slice with steps writes beyond its memory on cpu."""
    if step == 1:
        part: Tensor = get_platform().narrow(x, dim, first, size)
        return part
    numbers = get_platform().arange(0, size) * step + first
    return ops.gather(x, numbers, dim)


def _each(value: Any, count: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values if len(values) == count else values * count


def _padded(x: Tensor, padding: Any, reach: list[int]) -> Tensor:
    if padding == "same":
        pairs = [(r // 2, r - r // 2) for r in reach]
    else:
        pairs = [(p, p) for p in _each(0 if padding == "valid" else padding, len(reach))]
    if not any(before or after for before, after in pairs):
        return x
    return ops.pad(x, tuple(n for pair in reversed(pairs) for n in pair))
