r"""Losses of classes: kernels that make one pass over the scores where frameworks make several.

Of a row of scores ``x`` over all classes ``C`` with target ``t``, class weights ``w`` (1 each if there are none), smoothing ``s``::

    loss = a lse - b x_t - e sum over c of w_c x_c,    lse = log(sum over c of exp(x_c))
    b = (1 - s) w_t,  e = s / C,  a = b + e sum(w)
    d loss / d x_c = a exp(x_c - lse) - b [c = t] - e w_c

Scores are ``(n, c)``, of some of the classes; whoever has others tells of them. Target: integers ``(n,)``, numbers among all classes.
Sums are float32. Source: Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv 1805.02867.
"""

from __future__ import annotations

from typing import Protocol

from hp_platform.protocols.tensor import Tensor


class ScoreKernels(Protocol):
    """The three steps of a loss and its gradient; nothing of it is recorded. ``weights``, if any, are of the classes of the scores."""

    def sums(
        self,
        scores: Tensor,
        target: Tensor,
        weights: Tensor | None,
        *,
        start: int,
        ignore_index: int,
        has_spread: bool,
        told: Tensor | None = None,
    ) -> Tensor:
        """What the scores of classes ``start ... start + c - 1`` tell of each row: ``(k, n)`` float32, the same ``k`` for all ranks.

        The largest score, the sum of exponentials measured from it, ``x_t`` (0 where it is not here); with weights ``w_t``
        (likewise); with ``has_spread`` ``sum of w_c x_c``, and with both the sum of the weights. ``told``: of other classes, to
        which these are added, in place.
        """
        ...

    def losses(
        self,
        told: Tensor,
        target: Tensor,
        *,
        num_classes: int,
        ignore_index: int,
        label_smoothing: float,
        is_weighted: bool,
    ) -> tuple[Tensor, ...]:
        """Of what all ranks have told, ``(ranks * k, n)`` or ``(..., k, n)``: losses, ``w_t`` (both 0 where the target is the ignored one),
        ``lse``, ``a``, ``b`` (both 0 there), ``(n,)`` float32, and the targets in int64 with 0 in place of the ignored one.
        """
        ...

    def gradient(
        self,
        scores: Tensor,
        out: Tensor,
        target: Tensor,
        weights: Tensor | None,
        factors: tuple[Tensor, Tensor, Tensor],
        incoming: Tensor,
        *,
        start: int,
        ignore_index: int,
        of_spread: float,
    ) -> Tensor:
        """``out`` becomes the gradient of the scores of classes ``start ...``, rounded to its dtype once.

        ``out`` is ``(n, c)``, contiguous along the classes, and may be ``scores`` itself. ``factors``: ``lse``, ``a``, ``b`` of
        :meth:`losses`; ``incoming`` ``(n,)``: the gradient of the losses, which counts as 0 for ignored targets; ``of_spread``: ``e``.
        """
        ...


class ScoreOps(Protocol):
    """Which kernels there are."""

    def score_kernels(self, x: Tensor) -> ScoreKernels | None:
        """Those for scores on the device of ``x`` and of its dtype; None where there are none: then compose the formulas."""
        ...
