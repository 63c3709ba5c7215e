"""Logarithms of probabilities over classes that are cut, and the loss of such logarithms, with their true gradients.

[Note: the gradient of log_softmax] A change of one score changes the logarithms of all classes, also of other ranks:
``d loss / d x_c = g_c - p_c sum over all c' of g_c'``. So the backward takes one all-reduce of a number per row. Only in a
cross-entropy, where the sum is known beforehand, is there nothing to communicate.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hp_dtensor.no_elements import zeros_from
from hp_platform import get_platform
from hp_platform.on_platform import once
from hp_tp.loss.classes import ClassCut
from hp_tp.loss.rows import at_classes, base, refuse_unknown, targets_of, wide

Tensor = Any


def log_softmax(x: Tensor, dim: int, cut: ClassCut) -> Tensor:
    """``x - log(sum(exp(x)))`` over all ranks' classes, for this rank's scores ``x`` with its classes in ``dim``.

    Differentiable any number of times. Sums are taken in float32 for 16-bit scores; the result has the dtype of ``x``.
    Communication: one all-reduce (max) and one (sum) of a number per row; in backward one (sum).
    """
    return _functions().LogSoftmax.apply(x, dim, cut)


def nll_of_rows(
    logs: Tensor, target: Tensor, weight: Tensor | None, cut: ClassCut, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """``-w_t logs_t`` of every row, and ``w_t``; 0 where the target is ignored.

    ``logs`` are this rank's ``(n, c)`` or ``(n, c, d)``, ``weight`` has all classes. Communication: one all-reduce of a number per
    row; in backward none.
    """
    platform = get_platform()
    targets = targets_of(target, cut, ignore_index)
    refuse_unknown(targets, cut.num_classes)
    zeros = platform.zeros(tuple(target.shape), logs.dtype, platform.device_of(logs))
    if cut.size == 0:
        chosen = zeros_from(zeros, [logs])
    else:
        chosen = platform.where(targets.is_mine, at_classes(logs, targets.ids), zeros)
    counts = platform.cast(targets.is_kept, logs.dtype)
    if weight is not None:
        flat = platform.take_along(platform.detach(weight), 0, platform.reshape(targets.of_all, (-1,)))
        taken = platform.cast(platform.reshape(flat, tuple(target.shape)), logs.dtype)
        counts = platform.where(targets.is_kept, taken, zeros)
    total = cut.differentiable_total(chosen)
    return platform.where(targets.is_kept, -total * counts, zeros), counts


@once
def _functions(platform: Any) -> SimpleNamespace:
    class LogSoftmax(platform.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, dim: int, cut: ClassCut) -> Tensor:
            ctx.dim, ctx.cut = dim, cut
            scores = platform.cast(platform.detach(x), wide(x.dtype))
            shape = (*scores.shape[:dim], 1, *scores.shape[dim + 1 :])
            device = platform.device_of(scores)
            if cut.size == 0:
                largest = platform.full(shape, float("-inf"), scores.dtype, device)
            else:
                largest = platform.amax(scores, dim, keepdim=True)
            wait = cut.begin_largest(largest)
            powers = platform.zeros(shape, scores.dtype, device)
            if cut.size:
                powers = platform.sum(platform.exp(scores - base(largest)), dim, keepdim=True)
            origin = base(wait())
            total = cut.total(powers * platform.exp(largest - origin))
            # Nothing is stretched over an empty piece.
            logs = scores - (origin + platform.log(total)) if cut.size else platform.zeros_like(scores)
            logs = platform.cast(logs, x.dtype)
            ctx.save_for_backward(logs)
            return logs

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple:
            (logs,) = ctx.saved_tensors
            dtype = wide(g.dtype)
            whole = ctx.cut.differentiable_total(platform.sum(platform.cast(g, dtype), ctx.dim, keepdim=True))
            if ctx.cut.size == 0:
                return platform.zeros_like(g) + zeros_from(platform.zeros_like(g), [whole]), None, None
            total = ctx.cut.used_differently(whole)
            gradient = g - platform.exp(platform.cast(logs, dtype)) * total
            return platform.cast(gradient, g.dtype), None, None

    return SimpleNamespace(LogSoftmax=LogSoftmax)
