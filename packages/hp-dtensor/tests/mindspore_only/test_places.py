"""Reads and writes at places that tensors name, by MindSpore's functions on DTensors: values and gradients of the unsharded tensors."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, ops

from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_dtensor._mindspore.composed.index import index_add
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

sys.path.extend((str(Path(__file__).parents[1]), str(Path(__file__).parent)))
from rule_cases import Cases, case, check, t, whole_numbers
from spelled import check_call

X, CUBE = np.random.RandomState(0).randn(5, 3), np.random.RandomState(1).randn(5, 3, 2)
ROWS, TWICE = np.array([4, 0, 2]), np.array([4, 1, 4])
PLACES, SAME = np.array([[4, 1], [0, 2], [2, 1]]), np.array([[4, 1], [0, 2], [4, 1]])
V, VS = np.array([0.5, -2.0, 1.25]), np.random.RandomState(2).randn(3, 3)
AT = np.array([[0, 4, 2], [1, 4, 0]])


def _columns(at: Any) -> tuple[Any, Any]:
    return at[:, 0], at[:, 1]


def _added(x: Any, at: Any, values: Any, sign: int = 1) -> Any:
    """By one-hot rows: independent of all scatters."""
    places = at[:, 0] * 3 + at[:, 1]
    rows = (mint.unsqueeze(places, -1) == Tensor(np.arange(15))).astype(x.dtype)
    return x + sign * mint.sum(rows * mint.unsqueeze(values, -1), 0).reshape((5, 3))


def _replaced(x: Any, at: Any, values: Any) -> Any:
    places = at[:, 0] * 3 + at[:, 1]
    rows = (mint.unsqueeze(places, -1) == Tensor(np.arange(15))).astype(x.dtype)
    kept = 1 - mint.sum(rows, 0).reshape((5, 3))
    return x * kept + mint.sum(rows * mint.unsqueeze(values, -1), 0).reshape((5, 3))


def _rows_added(x: Any, at: Any, values: Any, alpha: float = 1) -> Any:
    rows = (mint.unsqueeze(Tensor(np.arange(5)), -1) == at).astype(x.dtype)
    summands = mint.unsqueeze(rows, -1) * mint.unsqueeze(values, 0)
    return x + Tensor(np.array(alpha, np.float64)) * mint.sum(summands, 1)


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
    "ops gather_nd": (ops.gather_nd, lambda x, at: x[_columns(at)], (X, PLACES)),
    "GatherNd of rows": (ops.GatherNd(), lambda x, at: x[_columns(at)], (CUBE, SAME)),
    "Tensor gather_nd": (lambda x, at: x.gather_nd(at), lambda x, at: x[_columns(at)], (X, SAME)),
    "tensor_scatter_add": (ops.tensor_scatter_add, _added, (X, SAME, V)),
    "tensor_scatter_sub": (ops.tensor_scatter_sub, lambda *given: _added(*given, -1), (X, SAME, V)),
    "TensorScatterUpdate": (ops.TensorScatterUpdate(), _replaced, (X, PLACES, V)),
    "TensorScatterUpdate in the first piece only": (
        ops.TensorScatterUpdate(),
        _replaced,
        (X, np.array([[0, 1], [2, 2]]), V[:2]),
    ),
    "tensor_scatter_add in the last piece only": (
        ops.tensor_scatter_add,
        _added,
        (X, np.array([[4, 1], [4, 1]]), V[:2]),
    ),
    "TensorScatterUpdate of rows": (
        ops.TensorScatterUpdate(),
        lambda x, at, values: ops.tensor_scatter_update(x, at, values),
        (X, ROWS[:, None], VS),
    ),
    "tensor_scatter_elements": (
        lambda x, at, values: ops.tensor_scatter_elements(x, at, values, 0, "add"),
        lambda x, at, values: ops.tensor_scatter_elements(x, at, values, 0, "add"),
        (X, AT, VS[:2]),
    ),
    "mint index_add": (lambda x, at, y: mint.index_add(x, 0, at, y), _rows_added, (X, TWICE, VS)),
    "mint index_add scaled": (
        lambda x, at, y: mint.index_add(x, 0, at, y, alpha=0.3),
        lambda x, at, y: _rows_added(x, at, y, 0.3),
        (X, TWICE, VS),
    ),
    "Tensor index_add": (lambda x, at, y: x.index_add(0, at, y), _rows_added, (X, TWICE, VS)),
    "Tensor index_add of columns": (
        lambda x, at, y: x.index_add(-1, at, y, alpha=2),
        lambda x, at, y: _rows_added(x.t(), at, y.t(), 2).t(),
        (VS[:, [0, 1, 2, 0, 1]].copy(), TWICE, VS),
    ),
}


@distributed(2, backends="mindspore")
def test_functions_of_mindspore_give_values_and_gradients_of_the_unsharded_tensors(world: World) -> None:
    for name, (call, expected, arrays) in CALLS.items():
        check_call(world, name, call, expected, [Tensor(array) for array in arrays])


CASES: Cases = {}
case(CASES, "index_add", index_add, t(5, 3), 0, whole_numbers(4, below=5), t(4, 3))
case(CASES, "index_add", index_add, t(2, 3, 5), -1, whole_numbers(3, below=5), t(2, 3, 3))
case(CASES, "index_add", index_add, t(1, 3), 0, whole_numbers(2, below=1), t(2, 3))


# Sums of up to five numbers in float64.
@pytest.mark.parametrize("name", CASES)
@distributed(world_size=1, backends="mindspore")
def test_sum_at_places_has_values_and_gradients_of_the_unsharded_one(name: str, world: World) -> None:
    check(CASES[name], samples=2, tolerance=1e-8)


def _by_numpy(at: Any, values: Any, sign: int | None) -> Any:
    y = X.copy()
    if sign is None:
        y[at] = values
    else:
        np.add.at(y, at, sign * values)
    return y


WRITES: dict[str, tuple[Callable[..., Any], Any, Any, int | None]] = {
    "scatter_update": (ops.scatter_update, ROWS, VS, None),
    "ScatterUpdate of a matrix of rows": (ops.ScatterUpdate(), ROWS[:2, None], VS[:2, None], None),
    "scatter_nd_update": (ops.scatter_nd_update, PLACES, V, None),
    "scatter_add": (ops.scatter_add, TWICE, VS, 1),
    "scatter_sub": (ops.ScatterSub(), TWICE, VS, -1),
    "index_add": (lambda p, at, y: ops.index_add(p, at, y, 0), TWICE.astype(np.int32), VS, 1),
}


@distributed(2, backends="mindspore")
def test_writes_into_a_parameter_stand_in_it(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    for name, (write, at, values, sign) in WRITES.items():
        where = _columns(at) if name == "scatter_nd_update" else at
        expected = Tensor(_by_numpy(where, values, sign))
        for place in (Shard(0), Shard(1), Replicate()):
            p = Parameter(distribute_tensor(Tensor(X), mesh, [place]))
            write(
                p,
                distribute_tensor(Tensor(at), mesh, [Shard(0)]),
                distribute_tensor(Tensor(values), mesh, [Shard(0)]),
            )
            assert p.placements == (place,)
            assert_parity(p.detach(), expected, rtol=0, atol=1e-12, name=f"{name} of {place}")


SUBSCRIPTS: dict[str, Any] = {
    "numbers": lambda at: at,
    "numbers and a column": lambda at: (at, 1),
    "a slice and numbers": lambda at: (slice(None), at[:2] // 2),
    "a mask": lambda at: Tensor(X) > 1,
    "a row": lambda at: 3,
}


@distributed(2, backends="mindspore")
def test_subscripts_write_into_a_parameter_where_it_lies(world: World) -> None:
    mesh, at = init_device_mesh(world.device_type, (2,)), Tensor(ROWS)
    for name, subscript in SUBSCRIPTS.items():
        expected = Tensor(X.copy())
        expected[subscript(at)] = 7.0
        for place in (Shard(0), Shard(1), Replicate()):
            p = Parameter(distribute_tensor(Tensor(X), mesh, [place]))
            memory = p.to_local().data_ptr()
            with world.platform.no_grad():
                p[subscript(distribute_tensor(at, mesh, [Replicate()]))] = 7.0
            assert (p.placements, p.requires_grad) == ((place,), True) and p.to_local().data_ptr() == memory
            assert_parity(p.detach(), expected, rtol=0, atol=0, name=f"{name} of {place}")
            with pytest.raises(ValueError, match=r"cannot record setitem .*: use .*, or no_grad\(\)"):
                p[subscript(at)] = 7.0


@distributed(1, backends="mindspore")
def test_a_plain_parameter_takes_no_dtensor(world: World) -> None:
    at = distribute_tensor(Tensor(ROWS), init_device_mesh(world.device_type, (1,)), [Shard(0)])
    with pytest.raises(NotImplementedError, match="ScatterUpdate"):
        ops.scatter_update(Parameter(Tensor(X)), at, Tensor(VS))


@distributed(2, backends="mindspore")
def test_ranks_on_which_nothing_falls_write_nothing(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    at, values = np.array([0, 1]), VS[:2]
    for write, sign in ((ops.scatter_update, None), (ops.scatter_add, 1)):
        p = Parameter(distribute_tensor(Tensor(X), mesh, [Shard(0)]))
        write(p, *(distribute_tensor(Tensor(a), mesh, [Replicate()]) for a in (at, values)))
        assert_parity(p.detach(), Tensor(_by_numpy(at, values, sign)), rtol=0, atol=1e-12)
