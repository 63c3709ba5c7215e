"""``vocab_parallel_cross_entropy``: for code that cuts its classes by hand, and under a name that both frameworks have."""

from __future__ import annotations

from typing import Any

from hp_dtensor.module_tensors import is_dtensor
from hp_dtensor.rules import RULES
from hp_platform import get_platform
from hp_tp.loss.classes import cut_of_ranks
from hp_tp.loss.context import loss_parallel
from hp_tp.loss.cross_entropy import as_rows, reduced, row_losses
from hp_tp.loss.options import LossOptions, check_target, check_weight, checked_options
from hp_tp.loss.rows import wide

Tensor = Any
_NAME = "vocab_parallel_cross_entropy"


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    num_classes: int | None = None,
    mesh: Any = None,
    group: Any = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The cross-entropy of logits of which every rank has the columns of its own classes, without gathering them.

    For plain tensors, as in code that calls collectives itself (Megatron's function of this name). Every rank gets the same
    result, that of the whole logits in one process; the gradient of ``logits`` is that of this one loss (not of a sum of the
    ranks' copies). Logits may also be a DTensor whose classes are cut, then as ``cross_entropy`` inside of
    :func:`hp_tp.loss_parallel`, and the result is a DTensor: on MindSpore, whose own function is made of several, this is the one
    that communicates least.

    Args:
        logits: this rank's, ``(n, c)``, ``(n, c, d1, ...)`` or ``(c,)``, floating. Rank r of the mesh or group has the classes of
            chunk r, as ``torch.chunk`` cuts them: chunks of ``ceil(num_classes / ranks)``, the last ones short or empty. Or a DTensor.
        target: class numbers in ``0 ... num_classes - 1``, integers, ``(n,)``, ``(n, d1, ...)`` or ``()``, equal on all ranks.
        num_classes: of all ranks together. May be left out only if neither mesh nor group is given.
        mesh: a mesh of one dim along which the classes are cut. Not for a DTensor, which knows its own.
        group: or a process group, in the order of its ranks. Neither: this process has all classes.
        weight: of each class, ``(num_classes,)`` on every rank. Default: 1 each. Not differentiated.
        ignore_index: this target counts for nothing.
        reduction: ``"none"``: the losses, in the shape of ``target``; ``"sum"``; ``"mean"``: divided by the sum of the weights of the
            targets that are not ignored (NaN if all are). Scalars are 0-d.
        label_smoothing: share of the target, 0 to 1, that is spread evenly over all classes.

    Returns float32 for 16-bit logits (sums are taken in float32, and the loss is not rounded), else the dtype of ``logits``.

    Communication: one all-reduce (max) of a number per target, and one (sum) of 2 numbers per target, 3 with label smoothing; in
    backward none. On cuda with Triton, logits ``(n, c)`` of 16 or 32 bits take kernels: one pass over the logits forward and one
    backward, and one all-gather of 3 numbers per target instead, one more with smoothing, one with weights, one with both.
    Memory until backward: the logits and a few numbers per target.
    ValueError for shapes, sizes and options that do not fit; a target that is no class is refused by the framework's kernel.
    Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3.
    """
    platform = get_platform()
    options = checked_options(_NAME, reduction, ignore_index, label_smoothing)
    if is_dtensor(logits):
        if not (num_classes is None and mesh is None and group is None):
            raise ValueError(
                f"{_NAME} got logits that are a DTensor, which says itself how its classes are cut: leave num_classes, mesh and "
                f"group out"
            )
        return _of_dtensor(logits, target, weight, options)
    if not platform.is_tensor(logits) or logits.ndim == 0 or not platform.is_floating(logits.dtype):
        raise ValueError(f"{_NAME} takes floating logits (n, classes, ...), got {_shown(logits)}")
    class_dim = 0 if logits.ndim == 1 else 1
    shape = (*logits.shape[:class_dim], *logits.shape[class_dim + 1 :])
    num_local = logits.shape[class_dim]
    cut = cut_of_ranks(_NAME, mesh, group, num_classes, num_local, f"logits of shape {tuple(logits.shape)}")
    check_target(_NAME, target, shape, f"logits of shape {tuple(logits.shape)}")
    check_weight(_NAME, weight, cut.num_classes)
    losses, counts = row_losses(*as_rows(logits, target), weight, cut, options)
    return reduced(losses, platform.sum(counts), options.reduction, shape)


def _of_dtensor(logits: Any, target: Any, weight: Any, options: LossOptions) -> Any:
    """By the rule of the block, which gives the dtype that its function gives."""
    from hp_dtensor.native import dispatch

    # By position as the framework's function has them, with its two old switches.
    rest = None, options.ignore_index, None, options.reduction, options.label_smoothing
    with loss_parallel(strict=False):
        return dispatch(RULES["cross_entropy"], _cross_entropy, (logits, target, weight, *rest), None)


def _cross_entropy(scores: Tensor, target: Tensor) -> Tensor:
    return get_platform().zeros((), wide(scores.dtype), get_platform().device_of(scores))


def _shown(x: Any) -> str:
    platform = get_platform()
    if not platform.is_tensor(x):
        return type(x).__name__
    return f"{platform.dtype_name(x.dtype)} of shape {tuple(x.shape)}"
