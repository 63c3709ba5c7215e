"""The gradients of a linear layer and the cross-entropy behind it, a few classes at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hp_platform import get_platform
from hp_tp.loss.classes import ClassCut
from hp_tp.loss.cross_entropy import gradient_block
from hp_tp.loss.kernels import gradient_by
from hp_tp.loss.options import LossOptions
from hp_tp.loss.rows import targets_of, wide

Tensor = Any
GradientOfScores = Callable[[Tensor, ClassCut, int, bool], tuple[Tensor, Tensor]]
"""Of scores, which it may overwrite, whose classes they are, where these begin among this rank's, and whether the gradient is
needed in the scores' dtype: that gradient (if it is needed), and it in the dtype of the layer's operands.
"""


def chunks(num_classes: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Start and length of the classes that are worked on at a time."""
    for start in range(0, num_classes, chunk):
        yield start, min(chunk, num_classes - start)


def part_of(x: Tensor | None, start: int, length: int) -> Tensor | None:
    """Some rows, of nothing nothing."""
    return None if x is None else get_platform().narrow(x, 0, start, length)


def scores_of(x: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> Tensor:
    """``x W^T + b``, of 16-bit operands in float32: never rounded."""
    platform = get_platform()
    turned, dtype = platform.transpose(linear_weight, 0, 1), wide(x.dtype)
    if platform.dtype_name(x.dtype) == dtype:
        scores = platform.matmul(x, turned)
    else:
        scores = platform.matmul_in(x, turned, dtype)
    return scores if linear_bias is None else platform.add_(scores, platform.cast(linear_bias, dtype))


def gradients(
    layer: Sequence[Any], needed: Sequence[bool], cut: ClassCut, chunk: int, gradient: GradientOfScores
) -> list[Any]:
    """Of input, weight and bias as far as they are needed, chunk by chunk."""
    platform = get_platform()
    x, linear_weight, linear_bias = layer
    is_empty = 0 in x.shape or cut.size == 0
    made = platform.zeros if is_empty else platform.empty  # every element is written
    device = platform.device_of(x)
    of_x = made(tuple(x.shape), wide(x.dtype), device) if needed[0] else None
    of_weight = made(tuple(linear_weight.shape), linear_weight.dtype, device) if needed[1] else None
    of_bias = []

    def add_chunk(start: int, length: int) -> None:
        """Scores and their gradient are gone at the end, before the next are made."""
        own = part_of(linear_weight, start, length)
        scores = scores_of(x, own, part_of(linear_bias, start, length))
        exact, rounded = gradient(scores, cut.part(start, length), start, needed[2])
        if needed[2]:
            of_bias.append(platform.cast(platform.sum(exact, 0), linear_bias.dtype))
        if needed[1]:
            platform.matmul_into(part_of(of_weight, start, length), platform.transpose(rounded, 0, 1), x)
        if needed[0]:
            platform.matmul_into(of_x, rounded, own, None if start == 0 else of_x)

    for start, length in () if is_empty else chunks(cut.size, chunk):
        add_chunk(start, length)
    of_x = platform.cast(of_x, x.dtype) if needed[0] else None
    if needed[2] and is_empty:
        of_bias.append(platform.zeros_like(platform.detach(linear_bias)))
    return [of_x, of_weight, platform.cat(of_bias) if needed[2] else None]


def kernel_gradient(
    kernels: Any,
    target: Tensor,
    weights: Any,
    factors: tuple[Tensor, Tensor, Tensor],
    incoming: Tensor,
    options: LossOptions,
    dtype: Any,
) -> GradientOfScores:
    """By one launch, which rounds what it writes; only for the sum of a bias it writes the scores' own dtype, in their place."""
    platform = get_platform()

    def gradient(scores: Tensor, cut: ClassCut, start: int, is_exact: bool) -> tuple[Tensor, Tensor]:
        out = scores
        if scores.dtype != dtype and not is_exact:
            out = platform.empty(tuple(scores.shape), dtype, platform.device_of(scores))
        part = part_of(weights, start, cut.size)
        gradient_by(kernels, scores, out, target, part, factors, incoming, cut, options)
        return out, platform.cast(out, dtype)

    return gradient


def composed_gradient(
    target: Tensor, weights: Any, rows: Sequence[Tensor], options: LossOptions, dtype: Any
) -> GradientOfScores:
    """By the framework's operations; ``rows``: lse, and the factors of softmax, target and smoothing."""
    platform = get_platform()

    def gradient(scores: Tensor, cut: ClassCut, start: int, _: bool) -> tuple[Tensor, Tensor]:
        targets = targets_of(target, cut, options.ignore_index)
        lse, a, b, *rest = rows
        places, part = (targets.ids, targets.is_mine), part_of(weights, start, cut.size)
        own = gradient_block(scores, lse, a, b, rest[0] if rest else None, places, part)
        return own, platform.cast(own, dtype)

    return gradient
