"""Normalisations. Statistics that primitives give beside the result are None: no function of MindSpore hands them out."""

from __future__ import annotations

from typing import Any

from hp_dtensor._mindspore.composed import norms as composed
from hp_dtensor._mindspore.spelling import Operation, is_on_cpu, spelling


@spelling("layer_norm", "LayerNormExt")
def _layer_norm(
    operation: Operation, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    def local(own: Any, *rest: Any) -> Any:
        return composed.layer_norm(own, *rest) if is_on_cpu(own) else operation.native(own, *rest)[0]

    return operation.follow("layer_norm", local, x, shape, weight, bias, eps), None, None


@spelling("layer_norm", "LayerNorm")
def _layer_norm_from(
    operation: Operation, x: Any, weight: Any, bias: Any, begin: int, begin_of_weights: int, eps: float
) -> Any:
    """Of an object whose dims begin somewhere; kernels on cpu round its statistics to float32."""
    if begin % x.ndim != begin_of_weights % x.ndim:
        raise ValueError(
            f"LayerNorm of a DTensor takes weights with the dims that are normalised over: begin_norm_axis is {begin}, "
            f"begin_params_axis {begin_of_weights}"
        )

    def local(own: Any, _: Any, weight: Any, bias: Any, eps: float) -> Any:
        if is_on_cpu(own):
            return composed.layer_norm(own, tuple(weight.shape), weight, bias, eps)
        return operation.native(own, weight, bias, begin, begin_of_weights, eps)[0]

    shape = tuple(x.shape[begin % x.ndim :])
    return operation.follow("layer_norm", local, x, shape, weight, bias, eps), None, None


@spelling("rms_norm", "RmsNorm")
def _rms_norm(operation: Operation, x: Any, weight: Any, eps: float = 1e-6) -> Any:
    def local(own: Any, shape: Any, weight: Any, eps: float) -> Any:
        if is_on_cpu(own):
            return composed.rms_norm(own, shape, weight, eps)
        return operation.native(own, weight, eps)[0]

    return operation.follow("rms_norm", local, x, tuple(weight.shape), weight, eps), None


@spelling("group_norm", "GroupNorm")
def _group_norm(
    operation: Operation, x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    def local(*given: Any) -> Any:
        return operation.native(*given)[0]

    return operation.follow("group_norm", local, x, groups, weight, bias, eps), None, None


@spelling("batch_norm", "BatchNormExt")
def _batch_norm(
    operation: Operation,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    def local(own: Any, mean: Any, var: Any, weight: Any, bias: Any, *rest: Any) -> Any:
        if is_on_cpu(own):
            return composed.batch_norm(own, mean, var, weight, bias, *rest)
        return operation.native(own, weight, bias, mean, var, *rest)[0]

    y = operation.follow("batch_norm", local, x, mean, var, weight, bias, training, momentum, eps)
    return y, None, None


@spelling("batch_norm", "BatchNorm")
def _batch_norm_of_object(operation: Operation, x: Any, *given: Any) -> Any:
    weight, bias, mean, var, training, eps, momentum = (*given, 0.1)[:7]
    y = operation.follow(
        "batch_norm", composed.batch_norm, x, mean, var, weight, bias, training, momentum, eps
    )
    return y, None, None, None, None


@spelling("normalize", "L2Normalize")
def _l2_normalize(operation: Operation, x: Any) -> Any:
    """``x / sqrt(max(sum(x^2), epsilon))``, by operations on DTensors."""
    dims = operation.attributes.attrs["axis"]
    square = (x * x).sum(tuple(dims) if isinstance(dims, (list, tuple)) else dims, keepdim=True)
    return x * square.clamp(min=operation.attributes.attrs["epsilon"]).rsqrt()
