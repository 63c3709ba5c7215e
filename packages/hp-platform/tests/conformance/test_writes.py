"""TensorOps: safe in-place writes."""

from __future__ import annotations

import numpy as np
import pytest

NUMPY_DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
DTYPES = (*NUMPY_DTYPES, "bfloat16")


@pytest.mark.parametrize("name", DTYPES)
def test_in_place_writes_change_the_target(platform, make, equal, name):
    if name == "bool":
        x = make([True, False])
        assert platform.copy_(x, make([False, False])) is x
        equal(x, [False, False])
        platform.fill_(x, 1.0)
        equal(x, [True, True])
        return
    x = make([[1, 2, 3], [4, 5, 6]], name)
    alias = platform.detach(x)
    assert platform.copy_(x, make([[2, 4, 6]], "float32")) is x
    equal(alias, [[2, 4, 6]] * 2)
    assert platform.add_(x, make([1, 2, 3], name), alpha=2.0) is x
    equal(alias, [[4, 8, 12]] * 2)
    platform.add_(x, 1)
    equal(alias, [[5, 9, 13]] * 2)
    assert platform.mul_(x, 2) is x
    equal(alias, [[10, 18, 26]] * 2)
    platform.mul_(x, make([[1], [2]], name))
    equal(alias, [[10, 18, 26], [20, 36, 52]])
    assert platform.fill_(x, 7) is x
    equal(alias, np.full((2, 3), 7))


def test_in_place_writes_to_nothing_are_legal(platform, device, equal):
    x = platform.zeros((0, 3), "float32", device)
    platform.copy_(x, platform.zeros((0, 3), "float32", device))
    platform.add_(x, 1.0)
    platform.mul_(x, 2.0)
    platform.fill_(x, 1.0)
    equal(x, np.zeros((0, 3)))


def test_a_parameter_is_written_without_a_trace_in_the_graph(platform, make, equal):
    parameter = platform.parameter(make([1.0, 2.0]))
    source = platform.set_requires_grad_(make([3.0, 4.0]), True)
    platform.copy_(parameter, source * 2)
    platform.add_(parameter, source, alpha=-1.0)
    platform.mul_(parameter, 10.0)
    equal(parameter, [30.0, 40.0])
    assert platform.is_leaf(parameter)
    assert platform.requires_grad(parameter)
    platform.fill_(parameter, 5.0)
    platform.backward([platform.sum(parameter * 2)])
    equal(platform.get_grad(parameter), [2.0, 2.0])
    assert platform.get_grad(source) is None


def test_a_write_into_a_view_reaches_its_base(platform, device, equal, make, lacks):
    if lacks("write_into_view"):
        return
    base = platform.zeros((3, 2), "float32", device)
    platform.copy_(platform.narrow(base, 0, 1, 1), make([[1.0, 2.0]]))
    platform.copy_(platform.reshape(platform.narrow(base, 0, 2, 1), (2,)), make([3, 4], "int64"))
    equal(base, [[0, 0], [1, 2], [3, 4]])


def test_the_frameworks_own_in_place_arithmetic_changes_the_tensor(make, equal, lacks):
    if lacks("in_place_arithmetic"):
        return
    x = make([1.0, 2.0])
    x += 1
    equal(x, [2.0, 3.0])


def test_foreach_writes_leave_parameters_trainable(platform, make, equal):
    parameters = [platform.parameter(make([1.0])), platform.parameter(make([2.0, 3.0]))]
    platform.foreach_mul_(parameters, 2.0)
    platform.foreach_add_(parameters, [make([1.0]), make([1.0, 1.0])])
    equal(parameters[1], [5.0, 7.0])
    assert all(platform.is_leaf(p) and platform.requires_grad(p) for p in parameters)
