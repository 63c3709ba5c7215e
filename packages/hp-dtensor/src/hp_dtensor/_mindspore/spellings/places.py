"""Reads and writes at places that tensors of numbers name, some of them into a parameter.

A place of several numbers is a row of a tensor here; rules take one tensor for each of the numbers, as a subscript does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import mint, ops

from hp_dtensor._mindspore.composed.index import index_add
from hp_dtensor._mindspore.spelling import Operation, spelling
from hp_dtensor.errors import no_rule
from hp_dtensor.rng.places import is_dtensor
from hp_platform import get_platform

Write = Callable[..., Any]


# ---------------------------------------------------------------------------------------------------------------- reading
@spelling("getitem", "GatherNd")
def _gather_nd(operation: Operation, x: Any, places: Any) -> Any:
    """``x[i, j]`` for every row ``(i, j)`` of ``places``."""
    return operation.follow("getitem", lambda own, at: own[at], x, _of_each_dim(places))


def _of_each_dim(places: Any) -> tuple[Any, ...]:
    return tuple(places.unbind(-1) if is_dtensor(places) else mint.unbind(places, -1))


# ---------------------------------------------------------------------------------------------------- copies with writes
def _written(operation: Operation, x: Any, places: Any, values: Any, local: Write, adds: bool = False) -> Any:
    """``local(own, rows of places, values)`` writes what falls into a rank's piece."""

    def run(own: Any, at: Any, own_values: Any, _: bool) -> Any:
        if (
            0 in own_values.shape
        ):  # kernels refuse to write nothing; the sum of nothing keeps the gradient's way
            return own + get_platform().sum(own_values)
        return local(own, ops.stack(list(at), -1), own_values)

    return operation.follow("index_put", run, x, _of_each_dim(places), values, adds)


@spelling("index_put", "TensorScatterUpdate")
def _update_places(operation: Operation, x: Any, places: Any, values: Any) -> Any:
    return _written(operation, x, places, values, operation.native)


@spelling("index_put", "TensorScatterAdd")
def _add_at_places(operation: Operation, x: Any, places: Any, values: Any) -> Any:
    return _written(operation, x, places, values, operation.native, adds=True)


@spelling("index_put", "TensorScatterSub")
def _subtract_at_places(operation: Operation, x: Any, places: Any, values: Any) -> Any:
    """As a sum, so that what is a sum may stay one."""
    return _written(operation, x, places, -values, ops.tensor_scatter_add, adds=True)


@spelling("index_add", "IndexAddExt")
def _index_add(operation: Operation, x: Any, dim: int, numbers: Any, source: Any, alpha: Any = 1) -> Any:
    local = operation.native_or(index_add)
    return operation.follow(
        "index_add", lambda *own, **_: local(*own, alpha), x, dim, numbers, source, alpha=alpha
    )


@spelling("scatter", "TensorScatterElements")
def _scatter_elements(
    operation: Operation, x: Any, numbers: Any, values: Any, dim: int = 0, reduction: int = 0
) -> Any:
    """Reductions by number: none, a sum. Others come as the refusal that they are elsewhere."""
    if reduction not in (0, 1):
        raise no_rule(operation.name, [x._spec] if is_dtensor(x) else [])
    rule = "scatter_add" if reduction else "scatter"

    def local(own: Any, dim: int, at: Any, own_values: Any) -> Any:
        return operation.native(own, at, own_values, dim, reduction)

    return operation.follow(rule, local, x, dim, numbers, values)


# ------------------------------------------------------------------------------------------------------- into a parameter
def _target(operation: Operation, x: Any, given: tuple[Any, ...]) -> Any:
    """A plain parameter takes no DTensor."""
    if not is_dtensor(x):
        raise no_rule(operation.name, [y._spec for y in given if is_dtensor(y)])
    return x


def _writing(primitive: str, names_rows: bool, adds: bool, sign: int = 1) -> None:
    @spelling("index_put", primitive)
    def read(operation: Operation, x: Any, numbers: Any, values: Any) -> Any:
        """``x[numbers] = values``, or ``+=`` or ``-=``; numbers that come twice count twice there.

        MindSpore records no such write, so none is recorded here.
        """
        _target(operation, x, (numbers, values))
        kernel = ops.tensor_scatter_add if adds else ops.tensor_scatter_update
        with get_platform().no_grad():
            at = numbers
            if names_rows:
                at = numbers.unsqueeze(-1) if is_dtensor(numbers) else mint.unsqueeze(numbers, -1)
            return x.copy_(_written(operation, x, at, values if sign > 0 else -values, kernel, adds))


_writing("ScatterUpdate", names_rows=True, adds=False)
_writing("ScatterNdUpdate", names_rows=False, adds=False)
_writing("ScatterAdd", names_rows=True, adds=True)
_writing("ScatterSub", names_rows=True, adds=True, sign=-1)


@spelling("index_add", "IndexAdd")
def _index_add_of_object(operation: Operation, x: Any, numbers: Any, source: Any) -> Any:
    """Adds into its target, and its result has the gradients of the sum."""
    dim = operation.attributes.axis
    y = operation.follow(
        "index_add", lambda own, dim, *rest: index_add(own, dim, *rest), _target(operation, x, (numbers, source)),
        dim, numbers, source,
    )  # fmt: skip
    with get_platform().no_grad():
        x.copy_(y)
    return y
