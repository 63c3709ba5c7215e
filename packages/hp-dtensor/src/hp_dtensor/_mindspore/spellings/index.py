"""Numbers as places: one-hot vectors, rows by number."""

from __future__ import annotations

from typing import Any

from mindspore import mint, ops

from hp_dtensor._mindspore.spelling import Operation, is_on_cpu, spelling
from hp_platform import get_platform


@spelling("one_hot", "OneHot", "OneHotExt")
def _one_hot(operation: Operation, ids: Any, count: int, of_place: Any, of_rest: Any, dim: int = -1) -> Any:
    def local(own: Any, count: int) -> Any:
        if not is_on_cpu(own):
            return operation.native(own, count, of_place, of_rest, -1)
        count = int(own.max()) + 1 if count == -1 else count
        places = get_platform().arange(0, count, own.dtype)
        return mint.where(mint.unsqueeze(own, -1) == places, of_place, of_rest)

    made = operation.follow("one_hot", local, ids, count)
    return made if dim in (-1, made.ndim - 1) else made.movedim(-1, dim)


@spelling("index_select", "IndexSelect")
def _index_select(operation: Operation, x: Any, dim: int, numbers: Any) -> Any:
    def local(own: Any, dim: int, own_numbers: Any) -> Any:
        if is_on_cpu(own):
            return ops.gather(own, own_numbers, dim)
        return operation.native(own, dim, own_numbers)

    return operation.follow("index_select", local, x, dim, numbers)


def _scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    return ops.tensor_scatter_elements(x, index, source, dim, "add")


@spelling("scatter", "Scatter")
def _scatter(operation: Operation, x: Any, dim: int, index: Any, source: Any, reduction: int = 0) -> Any:
    """The last argument is 0, or 1 for a sum."""
    if reduction:
        return operation.follow("scatter_add", _scatter_add, x, dim, index, source)
    return operation.follow("scatter", lambda *given: operation.native(*given, 0), x, dim, index, source)


@spelling("scatter_add", "ScatterAddExt")
def _scatter_add_function(operation: Operation, x: Any, dim: int, index: Any, source: Any) -> Any:
    return operation.follow("scatter_add", operation.native_or(_scatter_add), x, dim, index, source)
