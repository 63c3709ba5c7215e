"""Moments and norms of vectors."""

from __future__ import annotations

from typing import Any

from hp_dtensor._mindspore.composed import along as composed
from hp_dtensor._mindspore.dtypes import dtype_of
from hp_dtensor._mindspore.spelling import Operation, is_on_cpu, spelling
from hp_platform import get_platform


def _moment(rule: str, primitive: str, *, is_root: bool, with_mean: bool) -> None:
    @spelling(rule, primitive)
    def read(
        operation: Operation, x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False
    ) -> Any:
        def local(own: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
            if not is_on_cpu(own):
                return operation.native(own, dim, correction, keepdim)
            moment = composed.moment(own, dim, correction, keepdim, is_root)
            if not with_mean:
                return moment
            dims = tuple(range(own.ndim)) if dim is None else dim
            return moment, get_platform().mean(own, dims, keepdim)

        dims = dim if dim is None or isinstance(dim, int) else tuple(dim)
        return operation.follow(rule, local, x, dim=dims, correction=correction, keepdim=keepdim)


_moment("var", "Var", is_root=False, with_mean=False)
_moment("std", "Std", is_root=True, with_mean=False)
_moment("var_mean", "VarMean", is_root=False, with_mean=True)
_moment("std_mean", "StdMean", is_root=True, with_mean=True)


@spelling("std", "ReduceStd")
def _std_and_mean(operation: Operation, x: Any, dim: Any, is_unbiased: bool, keepdim: bool) -> Any:
    def local(own: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
        return composed.moment(own, dim, correction, keepdim, True)

    dims = dim if isinstance(dim, int) else tuple(dim) or None
    std = operation.follow("std", local, x, dim=dims, correction=int(is_unbiased), keepdim=keepdim)
    return std, x.mean(dims, keep_dims=keepdim)


@spelling("vector_norm", "LinalgVectorNorm")
def _vector_norm(
    operation: Operation, x: Any, order: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    def local(own: Any, *given: Any, dtype: Any = None) -> Any:
        if is_on_cpu(own):
            return composed.vector_norm(own if dtype is None else own.astype(dtype_of(dtype)), *given)
        return operation.native(own, *given, dtype)

    dims = dim if dim is None or isinstance(dim, int) else tuple(dim)
    return operation.follow("vector_norm", local, x, order, dims, keepdim, dtype)
