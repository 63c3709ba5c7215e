"""Losses, and softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor._mindspore.composed import losses as composed
from hp_dtensor._mindspore.dtypes import dtype_of
from hp_dtensor._mindspore.spelling import REDUCTIONS, Operation, is_on_cpu, spelling


def _elementwise(rule: str, primitive: str, on_cpu: Callable[..., Any], *options: str) -> None:
    """A loss whose primitive takes ``(input, target, *options)``, reductions as numbers, and on cpu is composed."""

    @spelling(rule, primitive)
    def read(operation: Operation, *args: Any) -> Any:
        given = dict(zip(("input", "target", *options), args, strict=True))
        x, target = given.pop("input"), given.pop("target")
        given["reduction"] = REDUCTIONS[given["reduction"]]

        def local(own: Any, own_target: Any, **named: Any) -> Any:
            if is_on_cpu(own):
                return on_cpu(own, own_target, **named)
            code = REDUCTIONS.index(named.pop("reduction"))
            return operation.native(own, own_target, *({"reduction": code, **named}.get(o) for o in options))

        return operation.follow(rule, local, x, target, **given)


_elementwise("mse_loss", "MSELossExt", composed.mse_loss, "reduction")
_elementwise("l1_loss", "L1LossExt", composed.l1_loss, "reduction")
_elementwise("kl_div", "KLDiv", composed.kl_div, "reduction", "log_target")
_elementwise("soft_margin_loss", "SoftMarginLoss", composed.soft_margin_loss, "reduction")
_elementwise(
    "binary_cross_entropy", "BinaryCrossEntropy", composed.binary_cross_entropy, "weight", "reduction"
)
_elementwise(
    "binary_cross_entropy_with_logits",
    "BCEWithLogitsLoss",
    composed.binary_cross_entropy_with_logits,
    "weight",
    "pos_weight",
    "reduction",
)


@spelling("smooth_l1_loss", "SmoothL1Loss")
def _smooth_l1_loss(operation: Operation, x: Any, target: Any, beta: float, reduction: int) -> Any:
    def local(own: Any, own_target: Any, beta: float = 1.0, reduction: str = "mean") -> Any:
        return operation.native(own, own_target, beta, REDUCTIONS.index(reduction))

    return operation.follow("smooth_l1_loss", local, x, target, beta=beta, reduction=REDUCTIONS[reduction])


@spelling("kl_div", "KLDivLoss")
def _kl_div_loss(operation: Operation, x: Any, target: Any) -> Any:
    def local(own: Any, own_target: Any, reduction: str, **_: Any) -> Any:
        return composed.kl_div(own, own_target, reduction)  # the object knows its own reduction only

    return operation.follow("kl_div", local, x, target, reduction=operation.attributes.reduction)


@spelling("nll_loss", "NLLLoss", "NLLLoss2d")
def _nll_loss(
    operation: Operation, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int = -100
) -> Any:
    def local(own: Any, own_target: Any, weight: Any = None, **named: Any) -> Any:
        if is_on_cpu(own):
            return composed.nll_loss(own, own_target, weight, **named)
        code = REDUCTIONS.index(named["reduction"])
        return operation.native(own, own_target, weight, code, named["ignore_index"])[0]

    loss = operation.follow(
        "nll_loss", local, x, target, weight, ignore_index=ignore_index, reduction=REDUCTIONS[reduction]
    )
    return loss, None  # the sum of the weights, for MindSpore's own backward


@spelling("cross_entropy", "SparseSoftmaxCrossEntropyWithLogits")
def _of_class_numbers(operation: Operation, logits: Any, labels: Any) -> Any:
    if operation.attributes.attrs["is_grad"]:
        raise NotImplementedError(
            "mindspore: SparseSoftmaxCrossEntropyWithLogits(is_grad=True) of DTensors gives a gradient, not the loss: take "
            "is_grad=False and backward()"
        )
    # The object gives the mean of the rows that it is given; the mean of the whole needs sums.
    return operation.follow("cross_entropy", composed.cross_entropy, logits, labels)


@spelling("softmax", "SoftmaxCrossEntropyWithLogits")
def _of_probabilities(operation: Operation, logits: Any, labels: Any) -> Any:
    """A loss for each row, and its derivative."""
    logarithms = operation.follow("softmax", composed.log_softmax, logits, -1)
    return -(labels * logarithms).sum(-1), logarithms.detach().exp() - labels


@spelling("softmax", "Softmax")
def _softmax(operation: Operation, x: Any, dim: Any = -1) -> Any:
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    if len(dims) != 1:
        raise ValueError(f"Softmax of a DTensor takes one dim, got {dim}")
    return operation.follow("softmax", lambda own, at: operation.native(own, at), x, dims[0])


@spelling("softmax", "LogSoftmax", "LogSoftmaxExt")
def _log_softmax(operation: Operation, x: Any, dim: int = -1, dtype: Any = None) -> Any:
    def local(own: Any, at: int, *rest: Any) -> Any:
        if not is_on_cpu(own):
            return operation.native(own, at, *rest)
        return composed.log_softmax(
            own.astype(dtype_of(rest[0])) if rest and rest[0] is not None else own, at
        )

    return operation.follow("softmax", local, x, dim, *(() if operation.name == "LogSoftmax" else (dtype,)))
