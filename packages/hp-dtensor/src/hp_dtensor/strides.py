"""Strides of a whole tensor, of which only pieces lie in memory."""

from __future__ import annotations

from collections.abc import Sequence


def whole_strides(local: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """In elements, of a dense tensor of ``shape`` whose dims lie in the order of the local strides, the largest outermost.

    A row-major piece gives row-major strides, a transposed one transposed strides; gaps of the piece do not count.
    """
    strides, step = [1] * len(shape), 1
    # Of equal strides, the right dim is the inner one.
    for dim in sorted(range(len(shape)), key=lambda d: (local[d], -d)):
        strides[dim] = step
        step = step * max(shape[dim], 1)
    return tuple(strides)
