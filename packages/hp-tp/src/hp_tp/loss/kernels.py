"""The steps of a loss by the platform's kernels, where it has some: one pass over the scores forward, and one backward.

[Note: one collective] What a rank knows of its classes can be put together only once the largest score of all is known, or is
told with it: each rank gets the few numbers of every other one, and all put them together alike, in the order of the ranks. For
3 numbers per row that is one launch in place of two, and until 16 ranks fewer bytes than waiting for the second takes.
"""

from __future__ import annotations

from typing import Any

from hp_dtensor import conversions
from hp_dtensor.rules.refusals import refuse_beyond
from hp_platform import get_platform
from hp_tp.loss.classes import ClassCut
from hp_tp.loss.options import LossOptions
from hp_tp.loss.rows import RowLosses, spread_factor

Tensor = Any


def kernels_for(x: Tensor) -> Any:
    """Those for scores ``x``, or scores made of it; None where the formulas are composed of the framework's operations."""
    return get_platform().score_kernels(x) if x.ndim == 2 else None


def told_by(
    kernels: Any,
    scores: Tensor,
    target: Tensor,
    weights: Tensor | None,
    cut: ClassCut,
    options: LossOptions,
    told: Tensor | None = None,
) -> Tensor:
    """What this rank knows of its rows by ``scores`` of the classes of ``cut``, and by ``told`` of those before."""
    return kernels.sums(
        scores,
        target,
        weights,
        start=cut.start,
        ignore_index=options.ignore_index,
        has_spread=bool(options.label_smoothing),
        told=told,
    )


def losses_by(
    kernels: Any, told: Tensor, target: Tensor, cut: ClassCut, options: LossOptions, *, is_weighted: bool
) -> RowLosses:
    """The loss of every row. Communication: one all-gather per group of what each rank has told."""
    for group in cut.groups:
        told = conversions.gathered(told, group)
    *found, known = kernels.losses(
        told,
        target,
        num_classes=cut.num_classes,
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
        is_weighted=is_weighted,
    )
    if known.shape[0]:
        refuse_beyond(known, cut.num_classes)
    return RowLosses(*found)


def gradient_by(
    kernels: Any,
    scores: Tensor,
    out: Tensor,
    target: Tensor,
    weights: Tensor | None,
    factors: tuple[Tensor, Tensor, Tensor],
    incoming: Tensor,
    cut: ClassCut,
    options: LossOptions,
) -> Tensor:
    """``out`` becomes the gradient of the scores of the classes of ``cut``; it may be ``scores``."""
    return kernels.gradient(
        scores,
        out,
        target,
        weights,
        factors,
        incoming,
        start=cut.start,
        ignore_index=options.ignore_index,
        of_spread=spread_factor(options, cut) if options.label_smoothing else 0.0,
    )
