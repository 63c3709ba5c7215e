"""A linear layer and the cross-entropy behind it in one: an autograd Function that holds the scores of a few classes at a time.

[Note: chunks of classes] The scores ``x W^T`` of all tokens are made for one chunk of classes after the other. Over tokens one
could go as well, but every chunk of tokens adds to the gradient of all of ``W``: that would be read and written once per chunk,
and would have to be held in float32 to be added up. By classes each row of that gradient is one product over all tokens, which
the kernel sums in float32 and rounds once, and what is added up over chunks is the gradient of ``x``, in float32: ``tokens x
features``, for a large vocabulary far smaller than ``W``.

[Note: scores again] Forward keeps ``x``, ``W`` and a few numbers per token; backward makes each chunk of scores again: 4 products
where the layer alone takes 3. To compute the gradients in forward instead (as Liger kernels and torch's own chunked operator
do) would save that product, but would hold the gradient of ``W`` (the largest of the model) through the peak of memory at the
end of forward, would need a product even where no backward follows, would multiply by the incoming gradient what 16-bit
gradients have already rounded (a loss scaled against underflow underflows), allows neither ``reduction="none"`` nor second
derivatives, and with cut classes takes two collectives per chunk: a gradient needs the sum over all classes, which forward knows
at its end only. Here the collectives are those of the plain loss: two, whatever the number of chunks.

Sources: Hsu et al., Liger Kernel, arXiv 2410.10989, section 3.2; Wijmans et al., Cut Your Losses in Large-Vocabulary Language
Models, arXiv 2411.09009 (classes as the inner loop).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hp_platform import get_platform
from hp_platform.on_platform import once
from hp_tp.loss.classes import ClassCut
from hp_tp.loss.cross_entropy import own_weights, row_losses
from hp_tp.loss.kernels import kernels_for, losses_by, told_by
from hp_tp.loss.linear_gradients import (
    chunks,
    composed_gradient,
    gradients,
    kernel_gradient,
    part_of,
    scores_of,
)
from hp_tp.loss.options import LossOptions
from hp_tp.loss.rows import (
    RowSums,
    base,
    block_size,
    largest_of,
    losses_of_rows,
    number,
    refuse_unknown,
    row_sums,
    spread_factor,
    targets_of,
    wide,
)

Tensor = Any


def linear_row_losses(
    x: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    cut: ClassCut,
    options: LossOptions,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """The losses of the rows of ``x`` (n, features) and what each counts in a mean, ``(n,)``, float32 for 16-bit ``x``.

    ``linear_weight`` (c, features) and ``linear_bias`` (c,) are of this rank's classes, all of one dtype; ``chunk`` classes are worked
    on at a time. The gradient of ``x`` is this rank's summand. Communication: as :func:`hp_tp.loss.cross_entropy.row_losses`.
    """
    apply = _functions().LinearRowLosses.apply
    losses, counts = apply(x, linear_weight, linear_bias, target, weight, cut, options, chunk)
    return losses, counts


def usual_chunk(x: Tensor, num_classes: int) -> int:
    """So many classes that their scores are 64 MB of float32 (4 MB on a CPU), but never more than a quarter of all.

    128 MB where the platform has kernels, which hold half of that beside the scores where operations hold twice as much: with fewer
    chunks the gradient of ``x`` is read and written less often. Larger ones would take memory for little: on an NVIDIA H200 the
    products of 2048 tokens and 8192 classes (64 MB) reach 98 % of the speed of those with eight times the classes.
    """
    times = 1 if kernels_for(x) is None else 2
    return max(1, min(times * block_size(x) // max(1, x.shape[0]), -(-num_classes // 4)))


def _merged(largest: Tensor, sums: RowSums, other_largest: Tensor, other: RowSums) -> tuple[Tensor, RowSums]:
    """Of two sets of classes together."""
    platform = get_platform()
    whole = platform.where(other_largest > largest, other_largest, largest)
    origin = base(whole)
    powers = sums.powers * platform.exp(largest - origin) + other.powers * platform.exp(
        other_largest - origin
    )
    spread = None if sums.spread is None else sums.spread + other.spread
    return whole, RowSums(powers, sums.chosen + other.chosen, spread)


@once
def _functions(platform: Any) -> SimpleNamespace:
    class LinearRowLosses(platform.Function):
        @staticmethod
        def forward(
            ctx: Any,
            x: Tensor,
            linear_weight: Tensor,
            linear_bias: Tensor | None,
            target: Tensor,
            weight: Tensor | None,
            cut: ClassCut,
            options: LossOptions,
            chunk: int,
        ) -> tuple[Tensor, Tensor]:
            layer = [None if y is None else platform.detach(y) for y in (x, linear_weight, linear_bias)]
            weight = None if weight is None else platform.detach(weight)
            weights = own_weights(weight, cut, options)
            kernels = kernels_for(layer[0])
            if kernels is not None:
                told = _told(kernels, layer, target, weights, cut, options, chunk)
                found = losses_by(kernels, told, target, cut, options, is_weighted=weights is not None)
            else:
                targets = targets_of(target, cut, options.ignore_index)
                refuse_unknown(targets, cut.num_classes)
                largest, sums = _sums(layer, target, weights, cut, options, chunk)
                wait = cut.begin_largest(largest)
                found = losses_of_rows(cut, options, largest, wait, sums, targets, weight)
            kept = [x, linear_weight, target, found.lse, found.of_softmax, found.of_target]
            more = [y for y in (linear_bias, weight) if y is not None]
            ctx.save_for_backward(*kept, *more)
            ctx.has_bias, ctx.is_weighted = linear_bias is not None, weight is not None
            ctx.cut, ctx.options, ctx.chunk, ctx.kernels = cut, options, chunk, kernels
            ctx.mark_non_differentiable(found.counts)
            return found.losses, found.counts

        @staticmethod
        def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple:
            x, linear_weight, target, lse, of_softmax, of_target, *more = ctx.saved_tensors
            linear_bias = more[0] if ctx.has_bias else None
            weight = more[-1] if ctx.is_weighted else None
            layer, needed = [x, linear_weight, linear_bias], list(ctx.needs_input_grad[:3])
            cut, options = ctx.cut, ctx.options
            if platform.is_grad_enabled():
                found = _differentiable_gradients(layer, needed, target, weight, cut, options, g)
                return (*found, *(None,) * 5)
            weights = own_weights(weight, cut, options)
            if ctx.kernels is not None:
                factors = lse, of_softmax, of_target
                by_kernels = kernel_gradient(ctx.kernels, target, weights, factors, g, options, x.dtype)
                return *gradients(layer, needed, cut, ctx.chunk, by_kernels), *(None,) * 5
            is_kept = target != options.ignore_index
            g = platform.where(is_kept, g, platform.zeros_like(g))
            rows: list[Tensor] = [lse, g * of_softmax, g * of_target]
            if options.label_smoothing:
                rows.append(g * number(spread_factor(options, cut), g))
            composed = composed_gradient(target, weights, rows, options, x.dtype)
            return *gradients(layer, needed, cut, ctx.chunk, composed), *(None,) * 5

    return SimpleNamespace(LinearRowLosses=LinearRowLosses)


def _sums(
    layer: Sequence[Any], target: Tensor, weights: Any, cut: ClassCut, options: LossOptions, chunk: int
) -> tuple[Tensor, RowSums]:
    """The largest score of each row among this rank's, and the sums measured from it."""
    platform = get_platform()
    x, linear_weight, linear_bias = layer
    has_spread = bool(options.label_smoothing)
    device, dtype = platform.device_of(x), wide(x.dtype)
    largest = platform.full((x.shape[0],), float("-inf"), dtype, device)
    zeros = platform.zeros((x.shape[0],), dtype, device)
    sums = RowSums(zeros, zeros, zeros if has_spread else None)
    for start, length in chunks(cut.size, chunk):
        scores = scores_of(x, part_of(linear_weight, start, length), part_of(linear_bias, start, length))
        own_largest = largest_of(scores)
        targets = targets_of(target, cut.part(start, length), options.ignore_index)
        own = row_sums(scores, own_largest, targets, part_of(weights, start, length), has_spread)
        largest, sums = _merged(largest, sums, own_largest, own)
    return largest, sums


def _told(
    kernels: Any,
    layer: Sequence[Any],
    target: Tensor,
    weights: Any,
    cut: ClassCut,
    options: LossOptions,
    chunk: int,
) -> Tensor:
    """What this rank's scores tell, chunk by chunk; a chunk's scores are gone before the next are made."""
    platform = get_platform()
    x, linear_weight, linear_bias = layer

    def of_chunk(start: int, length: int, told: Tensor | None) -> Tensor:
        own = part_of(linear_weight, start, length), part_of(linear_bias, start, length)
        part, some = cut.part(start, length), part_of(weights, start, length)
        return told_by(kernels, scores_of(x, *own), target, some, part, options, told)

    if cut.size == 0:
        none = platform.empty((x.shape[0], 0), wide(x.dtype), platform.device_of(x))
        return told_by(kernels, none, target, weights, cut, options)
    told = None
    for start, length in chunks(cut.size, chunk):
        told = of_chunk(start, length, told)
    return told


def _differentiable_gradients(
    layer: Sequence[Any],
    needed: Sequence[bool],
    target: Tensor,
    weight: Any,
    cut: ClassCut,
    options: LossOptions,
    g: Tensor,
) -> list[Any]:
    """Gradients that can be differentiated again, by way of all scores at once."""
    platform = get_platform()
    losses, _ = row_losses(platform.linear(*layer), target, weight, cut, options)
    inputs = [y for y, is_needed in zip(layer, needed, strict=True) if is_needed]
    found = iter(platform.grad([losses], inputs, [g], create_graph=True))
    return [next(found) if is_needed else None for is_needed in needed]
