"""Cross-entropy of scores whose classes are cut: an autograd Function on this rank's scores.

[Note: what lives until backward] The scores themselves, in their own dtype, and a few numbers per row. The softmax is computed
again from them in backward, ``exp(x - lse)``, which costs one pass over what must be read anyway; kept, it would be a second
copy of the scores, in float32. 16-bit scores are never held in float32 as a whole: where the platform has kernels for it, forward
and backward are one pass each that widens in registers, elsewhere they work block by block. The gradient needs nothing of the
other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from hp_platform import get_platform
from hp_platform.on_platform import once
from hp_tp.loss.classes import ClassCut
from hp_tp.loss.kernels import gradient_by, kernels_for, losses_by, told_by
from hp_tp.loss.log_softmax import log_softmax
from hp_tp.loss.options import LossOptions
from hp_tp.loss.rows import (
    Targets,
    along_classes,
    blocks,
    largest_of,
    losses_of_rows,
    number,
    of_classes,
    refuse_unknown,
    row_sums,
    rows_of,
    spread_factor,
    targets_of,
    wide,
)

Tensor = Any


def row_losses(
    x: Tensor, target: Tensor, weight: Tensor | None, cut: ClassCut, options: LossOptions
) -> tuple[Tensor, Tensor]:
    """The losses of the rows, and what each counts in a mean: ``(n,)`` or ``(n, d)``, float32 for 16-bit scores.

    Args:
        x: this rank's scores, ``(n, c)`` or ``(n, c, d)``.
        target: class numbers among all classes, ``(n,)`` or ``(n, d)``, equal on all ranks of the cut.
        weight: of all classes, or of this rank's (``options.is_weight_cut``).
        cut: which classes are this rank's.
        options: the reduction does not count here.

    Communication: one all-reduce (max) of a number per row, and one (sum) of 2 numbers per row, 3 with smoothing, one more with
    weights that are cut; by the platform's kernels one all-gather of 3 numbers per row, one more with smoothing, one with weights, one
    with both; in backward none. A backward that is itself recorded, for a second derivative, takes those of
    :func:`hp_tp.loss.log_softmax.log_softmax`.
    """
    losses, counts = _functions().RowLosses.apply(x, target, weight, cut, options)
    return losses, counts


def as_rows(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Scores ``(c,)``, ``(n, c)`` or ``(n, c, d1, ...)`` and targets as :func:`row_losses` takes them."""
    platform = get_platform()
    if x.ndim == 1:
        return platform.reshape(x, (1, x.shape[0])), platform.reshape(target, (1,))
    if x.ndim == 2:
        return x, target
    if x.ndim == 3:
        return x, target
    n, c = x.shape[:2]
    rest = 1
    for size in x.shape[2:]:
        rest = rest * size
    return platform.reshape(x, (n, c, rest)), platform.reshape(target, (n, rest))


def reduced(losses: Tensor, total_count: Tensor | None, reduction: str, shape: tuple[int, ...]) -> Tensor:
    """The losses as they are asked for; ``total_count`` is what a mean divides by."""
    platform = get_platform()
    if reduction == "none":
        return platform.reshape(losses, shape)
    total = platform.sum(losses)
    return total / total_count if reduction == "mean" else total


def gradient_block(
    scores: Tensor,
    lse: Tensor,
    of_softmax: Tensor,
    of_target: Tensor,
    of_spread: Tensor | None,
    targets: tuple[Tensor, Tensor],
    weights: Tensor | None,
) -> Tensor:
    """``a exp(x - lse) - b [c = t] - e w_c`` with ``a``, ``b``, ``e`` per row, for some rows or some classes."""
    platform = get_platform()
    ids, is_mine = targets
    gradient = platform.exp(scores - along_classes(lse))
    gradient = platform.mul_(gradient, along_classes(of_softmax))
    there = platform.where(is_mine, -of_target, platform.zeros_like(of_target))
    gradient = platform.add_along_(gradient, 1, along_classes(ids), along_classes(there))
    if of_spread is not None:
        rows = along_classes(of_spread)
        gradient = platform.add_(gradient, -rows if weights is None else -rows * of_classes(weights, scores))
    return gradient


def own_weights(weight: Tensor | None, cut: ClassCut, options: LossOptions) -> Tensor | None:
    """Those of this rank's classes."""
    if weight is None or options.is_weight_cut:
        return weight
    return get_platform().narrow(weight, 0, cut.start, cut.size)


@once
def _functions(platform: Any) -> SimpleNamespace:
    class RowLosses(platform.Function):
        @staticmethod
        def forward(
            ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, cut: ClassCut, options: LossOptions
        ) -> tuple[Tensor, Tensor]:
            weight = None if weight is None else platform.detach(weight)
            weights = own_weights(weight, cut, options)
            scores = platform.detach(x)
            kernels = kernels_for(scores)
            if kernels is not None:
                told = told_by(kernels, scores, target, weights, cut, options)
                found = losses_by(kernels, told, target, cut, options, is_weighted=weights is not None)
            else:
                targets = targets_of(target, cut, options.ignore_index)
                refuse_unknown(targets, cut.num_classes)
                largest = largest_of(scores)
                wait = cut.begin_largest(largest)
                sums = row_sums(scores, largest, targets, weights, bool(options.label_smoothing))
                found = losses_of_rows(cut, options, largest, wait, sums, targets, weight)
            ctx.cut, ctx.options, ctx.is_weighted = cut, options, weights is not None
            ctx.kernels = kernels
            kept = [x, target, found.lse, found.of_softmax, found.of_target]
            ctx.save_for_backward(*kept, *([] if weights is None else [weights]))
            ctx.mark_non_differentiable(found.counts)
            return found.losses, found.counts

        @staticmethod
        def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple:
            x, target, lse, of_softmax, of_target, *rest = ctx.saved_tensors
            weights = rest[0] if ctx.is_weighted else None
            if ctx.kernels is not None and not platform.is_grad_enabled():
                out = platform.empty(tuple(x.shape), x.dtype, platform.device_of(x))
                factors = lse, of_softmax, of_target
                gradient_by(ctx.kernels, x, out, target, weights, factors, g, ctx.cut, ctx.options)
                return out, None, None, None, None
            targets = targets_of(target, ctx.cut, ctx.options.ignore_index)
            g = platform.where(targets.is_kept, g, platform.zeros_like(g))
            rows: tuple[Tensor, ...] = (lse, g * of_softmax, g * of_target)
            if ctx.options.label_smoothing:
                rows = (*rows, g * number(spread_factor(ctx.options, ctx.cut), g))
            if platform.is_grad_enabled():
                gradient = _differentiable_gradient(ctx.cut, x, rows[1:], targets, weights)
            elif ctx.cut.size == 0:
                gradient = platform.zeros_like(x)
            else:
                gradient = _put_together(x, _gradients(x, rows, targets, weights))
            return gradient, None, None, None, None

    return SimpleNamespace(RowLosses=RowLosses)


def _gradients(
    x: Tensor, rows: tuple[Tensor, ...], targets: Targets, weights: Tensor | None
) -> Iterator[tuple[int, int, Tensor]]:
    """Start, length and gradient of each block of rows."""
    platform = get_platform()
    for start, length in blocks(x):
        scores = platform.cast(rows_of(x, start, length), wide(x.dtype))
        lse, a, b, *rest = [rows_of(y, start, length) for y in rows]
        places = rows_of(targets.ids, start, length), rows_of(targets.is_mine, start, length)
        yield start, length, gradient_block(scores, lse, a, b, rest[0] if rest else None, places, weights)


def _put_together(x: Tensor, found: Iterator[tuple[int, int, Tensor]]) -> Tensor:
    """Blocks of rows as one tensor like ``x``."""
    platform = get_platform()
    whole: Tensor = None
    parts = []
    can_write = platform.supports("write_into_view")
    for start, length, block in found:
        if length == x.shape[0]:
            return platform.cast(block, x.dtype)
        if not can_write:
            parts.append(platform.cast(block, x.dtype))
            continue
        if whole is None:
            whole = platform.empty(tuple(x.shape), x.dtype, platform.device_of(x))
        platform.copy_(platform.narrow(whole, 0, start, length), block)
    return whole if can_write else platform.cat(parts)


def _differentiable_gradient(
    cut: ClassCut, x: Tensor, factors: tuple[Tensor, ...], targets: Targets, weights: Tensor | None
) -> Tensor:
    """The gradient as a function of scores and incoming gradient, which can be differentiated again."""
    platform = get_platform()
    a, b, *rest = [along_classes(cut.used_differently(rows)) for rows in factors]
    scores = platform.cast(x, wide(x.dtype))
    gradient = a * platform.exp(log_softmax(scores, 1, cut))
    classes = platform.arange(0, cut.size, device=platform.device_of(x))
    is_target = platform.reshape(classes, (1, -1, *(1,) * (x.ndim - 2))) == along_classes(targets.ids)
    is_target = is_target & along_classes(targets.is_mine)
    gradient = gradient - platform.where(
        is_target, b + platform.zeros_like(gradient), platform.zeros_like(gradient)
    )
    if rest:
        gradient = gradient - (rest[0] if weights is None else rest[0] * of_classes(weights, scores))
    return platform.cast(gradient, x.dtype)
