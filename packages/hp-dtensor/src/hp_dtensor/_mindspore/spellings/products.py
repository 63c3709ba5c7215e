"""Products of matrices and vectors, dense layers, rows by number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor._mindspore.composed import products as composed
from hp_dtensor._mindspore.composed.einsum import einsum
from hp_dtensor._mindspore.spelling import Operation, is_on_cpu, refuse_on_cpu, spelling


@spelling("matmul", "MatMul", "BatchMatMul")
def _transposed_matmul(
    operation: Operation, x: Any, y: Any, is_x_transposed: bool = False, is_y_transposed: bool = False
) -> Any:
    """MindSpore's own has wrong gradients of small shapes, so the platform's runs."""
    x = x.transpose(-2, -1) if is_x_transposed else x
    y = y.transpose(-2, -1) if is_y_transposed else y
    return operation.follow("matmul", composed.matmul, x, y)


@spelling("matmul", "MatMulExt", "BatchMatMulExt", "Mm", "Mv", "Dot")
def _matmul(operation: Operation, x: Any, y: Any) -> Any:
    return operation.follow("matmul", composed.matmul, x, y)


def _composed_on_cpu(rule: str, primitive: str, on_cpu: Callable[..., Any]) -> None:
    @spelling(rule, primitive)
    def read(operation: Operation, *args: Any) -> Any:
        return operation.follow(rule, operation.native_or(on_cpu), *args)


_composed_on_cpu("outer", "Outer", composed.outer)
_composed_on_cpu("addmm", "Addmm", composed.added)
_composed_on_cpu("addmv", "Addmv", composed.added)
_composed_on_cpu("baddbmm", "Baddbmm", composed.added)
_composed_on_cpu("addbmm", "Addbmm", composed.addbmm)


@spelling("embedding", "Embedding")
def _embedding(
    operation: Operation,
    ids: Any,
    weight: Any,
    padding: Any = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    by_frequency: bool = False,
) -> Any:
    def local(ids: Any, own: Any, padding: Any = None, *rest: Any) -> Any:
        if not is_on_cpu(own):
            return operation.native(ids, own, padding, *rest)
        if padding is not None or by_frequency:
            refuse_on_cpu(
                own, "embedding has no kernel with padding_idx or scale_grad_by_freq", "leave them out"
            )
        return composed.embedding(ids, own)

    return operation.follow("embedding", local, ids, weight, padding, max_norm, norm_type, by_frequency)


@spelling("add", "BiasAdd")
def _bias_add(operation: Operation, x: Any, bias: Any, *_: Any) -> Any:
    """One number per channel, dim 1 in MindSpore's usual format, by operations on DTensors."""
    if operation.attributes.data_format == "NHWC":
        return x + bias
    return x + bias.reshape((1, -1, *(1 for _ in range(x.ndim - 2))))


@spelling("einsum", "Einsum")
def _einsum(operation: Operation, operands: Any) -> Any:
    def local(equation: str, *own: Any) -> Any:
        return einsum(equation, *own) if is_on_cpu(own[0]) else operation.native(own)

    return operation.follow("einsum", local, operation.attributes.init_attrs["equation"], *operands)


@spelling("add", "AddN")
def _sum_of_all(operation: Operation, summands: Any) -> Any:
    """By operations on DTensors."""
    total = summands[0]
    for x in summands[1:]:
        total = total + x
    return total
