"""What works along dims: the largest, the order, sums so far, moments, norms."""

from __future__ import annotations

from typing import Any

from mindspore import mint, ops

from hp_dtensor._mindspore.composed import along as composed
from hp_dtensor._mindspore.dtypes import dtype_of
from hp_dtensor._mindspore.spelling import Operation, is_on_cpu, refuse_on_cpu, spelling


@spelling("topk", "TopK")
def _topk_of_last(operation: Operation, x: Any, k: int) -> Any:
    return operation.follow("topk", lambda own, k, *_: operation.native(own, k), x, k)


@spelling("topk", "TopkExt")
def _topk(operation: Operation, *args: Any) -> Any:
    return operation.follow("topk", operation.native_or(composed.topk), *args)


@spelling("sort", "Sort")
def _sort_of_object(operation: Operation, x: Any) -> Any:
    given = operation.attributes.attrs
    return operation.follow(
        "sort", lambda own, **_: operation.native(own), x, given["axis"], given["descending"]
    )


def _sorting(rule: str, primitive: str, which: slice | int) -> None:
    @spelling(rule, primitive)
    def read(
        operation: Operation, x: Any, dim: int = -1, descending: bool = False, stable: bool = False
    ) -> Any:
        def local(own: Any, dim: int, descending: bool, stable: bool) -> Any:
            if not is_on_cpu(own):
                return operation.native(own, dim, descending, stable)
            if stable:
                refuse_on_cpu(own, f"{rule} keeps no order of equal elements", "leave stable out")
            return composed.sort(own, dim, descending)[which]

        return operation.follow(rule, local, x, dim, descending, stable)


_sorting("sort", "SortExt", slice(None))
_sorting("argsort", "ArgSort", 1)


def _place(rule: str, of_object: str, of_function: str, with_value: str) -> None:
    on_cpu = getattr(composed, rule)

    @spelling(rule, of_object)
    def read_object(operation: Operation, x: Any, dim: int = -1, dtype: Any = None) -> Any:
        def local(own: Any, dim: int, *_: Any) -> Any:
            return operation.native(own, dim, dtype)

        return operation.follow(rule, local, x, dim)

    @spelling(rule, of_function)
    def read(operation: Operation, *args: Any) -> Any:
        return operation.follow(rule, operation.native_or(on_cpu), *args)

    @spelling(rule.removeprefix("arg"), with_value)
    def read_with_value(operation: Operation, x: Any, dim: int = 0, keepdim: bool = False) -> Any:
        """MindSpore gives the place first."""

        def local(own: Any, *rest: Any) -> Any:
            return operation.native(own, *rest)[::-1]

        return operation.follow(rule.removeprefix("arg"), local, x, dim, keepdim)[::-1]


_place("argmax", "Argmax", "ArgMaxExt", "ArgMaxWithValue")
_place("argmin", "Argmin", "ArgMinExt", "ArgMinWithValue")


@spelling("cumsum", "CumsumExt")
def _cumsum(operation: Operation, x: Any, dim: int, dtype: Any = None) -> Any:
    def local(own: Any, dim: int, *rest: Any) -> Any:
        if not is_on_cpu(own):
            return operation.native(own, dim, *(rest or (None,)))
        return ops.cumsum(own.astype(dtype_of(rest[0])) if rest else own, dim)

    return operation.follow("cumsum", local, x, dim, *(() if dtype is None else (dtype,)))


@spelling("cumulative", "CumProd")
def _cumprod(operation: Operation, x: Any, dim: int, exclusive: bool = False, reverse: bool = False) -> Any:
    if reverse:
        return ops.flip(_cumprod(operation, ops.flip(x, (dim,)), dim, exclusive), (dim,))
    if exclusive:
        n = x.shape[dim]
        before = mint.narrow(_cumprod(operation, x, dim), dim, 0, n - 1)
        return mint.cat([mint.ones_like(mint.narrow(x, dim, 0, 1)), before], dim)
    return operation.follow("cumulative", composed.cumprod, x, dim)


@spelling("logsumexp", "LogSumExp")
def _logsumexp(operation: Operation, x: Any, dim: Any, keepdim: bool = False) -> Any:
    return operation.follow("logsumexp", operation.native_or(composed.logsumexp), x, dim, keepdim)


def _median(operation: Operation, x: Any, dim: int, keepdim: bool, local: Any) -> Any:
    return operation.follow("median", local, x, dim, keepdim)


@spelling("median", "Median")
def _median_of_object(operation: Operation, x: Any) -> Any:
    given = operation.attributes.attrs
    if given["global_median"]:
        return operation.follow("median", lambda own: operation.native(own)[0], x), None
    return _median(
        operation, x, given["axis"], given["keep_dims"], lambda own, *_: tuple(operation.native(own))
    )


@spelling("median", "MedianDim")
def _median_along(operation: Operation, x: Any, dim: int, keepdim: bool = False) -> Any:
    def local(own: Any, dim: int, keepdim: bool) -> Any:
        if is_on_cpu(own):
            return tuple(ops.median(own, dim, keepdim))
        return operation.native(own, dim, keepdim)

    return _median(operation, x, dim, keepdim, local)
