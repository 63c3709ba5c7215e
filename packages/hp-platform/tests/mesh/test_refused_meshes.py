"""Meshes that cannot be: each is refused at once, with what was given, what was expected, and what to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hp_platform.mesh import DeviceMesh, get_current_mesh, init_device_mesh

pytestmark = pytest.mark.once

VIRTUAL = "interleaved_parallel"


def make(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: DeviceMesh(*args, **{"_rank": 0, **kwargs})


def init(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: init_device_mesh(*args, **{"_rank": 0, **kwargs})


CONSTRUCTION: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("device no str", make(0, [0, 1]), TypeError, "device_type must be a str such as 'cpu', not int"),
    (
        "device unknown",
        make("tpu", [0]),
        ValueError,
        "unknown device_type 'tpu'; expected one of cpu, cuda, npu, gpu",
    ),
    (
        "device index",
        make("cuda:1", [0]),
        ValueError,
        "unknown device_type 'cuda:1'.*write 'cuda', a mesh has no device index",
    ),
    ("mesh an int", make("cpu", 4), TypeError, "mesh must be a nested list or tuple, .* not int"),
    ("mesh a str", make("cpu", "01"), TypeError, "mesh must be a nested list or tuple, .* not str"),
    ("mesh 0-d", make("cpu", np.array(3)), ValueError, r"mesh is the 0-d array 3; .* give for example \[3\]"),
    ("mesh empty", make("cpu", []), ValueError, r"mesh has shape \(0,\): it holds no rank"),
    ("mesh empty rows", make("cpu", [[], []]), ValueError, r"mesh has shape \(2, 0\): it holds no rank"),
    (
        "mesh ragged",
        make("cpu", [[0, 1], [2]]),
        ValueError,
        r"mesh is ragged: its rows have the shapes \[\(1,\), \(2,\)\]",
    ),
    ("mesh half flat", make("cpu", [0, [1]]), ValueError, "mesh is ragged"),
    (
        "ranks floats",
        make("cpu", np.array([0.0, 1.0])),
        TypeError,
        "a rank of mesh must be an integer, not 0.0",
    ),
    ("ranks bools", make("cpu", [False, True]), TypeError, "a rank of mesh must be an integer, not False"),
    (
        "ranks arrays",
        make("cpu", [np.array([0, 1])]),
        TypeError,
        "a rank of mesh must be an integer, not array",
    ),
    (
        "rank negative",
        make("cpu", [0, -1]),
        ValueError,
        "mesh has the rank -1; ranks run from 0 to 2147483647",
    ),
    (
        "rank no int32",
        make("cpu", [0, 2**31]),
        ValueError,
        "mesh has the rank 2147483648; ranks run from 0 to 2147483647",
    ),
    ("rank twice", make("cpu", [[0, 1], [1, 2]]), ValueError, r"mesh has the ranks \[1\] more than once"),
    ("rank of whom", make("cpu"), ValueError, "give the ranks of mesh, too"),
    (
        "names no tuple",
        make("cpu", [0], mesh_dim_names=["dp"]),
        TypeError,
        r"must be a tuple of str .* not \['dp'\]",
    ),
    ("names a str", make("cpu", [0], mesh_dim_names="dp"), TypeError, "must be a tuple of str .* not 'dp'"),
    (
        "names count",
        make("cpu", [0], mesh_dim_names=("dp", "tp")),
        ValueError,
        "has 2 names for 1 dims; give one name per dim",
    ),
    ("names twice", make("cpu", [[0]], mesh_dim_names=("dp", "dp")), ValueError, "has a name twice"),
    (
        "virtual first",
        make("cpu", [[0]], mesh_dim_names=(VIRTUAL, "dp")),
        ValueError,
        "virtual dim and must be the last one",
    ),
    (
        "virtual dim with ranks",
        make("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", VIRTUAL)),
        ValueError,
        r"each row of mesh must repeat one rank, as in .*; got the row \[0, 1\]",
    ),
    (
        "shape a list",
        init("cpu", [2, 2]),
        TypeError,
        r"mesh_shape must be a tuple of int such as \(2, 4\), not list",
    ),
    ("shape an int", init("cpu", 4), TypeError, "mesh_shape must be a tuple of int .* not int"),
    ("shape missing", init("cpu"), TypeError, "mesh_shape must be a tuple of int .* not NoneType"),
    ("shape empty", init("cpu", ()), ValueError, r"mesh_shape is empty; .* give for example \(1,\)"),
    (
        "size zero",
        init("cpu", (2, 0)),
        ValueError,
        r"mesh_shape \(2, 0\) has an entry below 1; sizes are positive",
    ),
    ("size negative", init("cpu", (-1, 2)), ValueError, r"mesh_shape \(-1, 2\) has an entry below 1"),
    ("size a float", init("cpu", (2.0,)), TypeError, "an entry of mesh_shape must be an integer, not 2.0"),
    (
        "init names no str",
        init("cpu", (2,), (0,)),
        TypeError,
        r"mesh_dim_names must be a tuple of str .* not \(0,\)",
    ),
    ("init names count", init("cpu", (2, 2), ("dp",)), ValueError, r"\('dp',\) has 1 names for 2 dims"),
    ("init names twice", init("cpu", (2, 2), mesh_dim_names=("a", "a")), ValueError, "has a name twice"),
    (
        "init name empty",
        init("cpu", (2, 2), ("dp", "")),
        ValueError,
        "has an empty name; every dim needs one",
    ),
    (
        "rank_list short",
        init("cpu", (2, 2), rank_list=[0, 1]),
        ValueError,
        r"rank_list has 2 ranks, but mesh_shape \(2, 2\) holds 4",
    ),
    (
        "rank_list twice",
        init("cpu", (2,), rank_list=(1, 1)),
        ValueError,
        r"rank_list has the ranks \[1\] more than once",
    ),
    (
        "rank_list a str",
        init("cpu", (2,), rank_list="01"),
        TypeError,
        r"rank_list must be a sequence of int such as \[0, 1\] or range\(2\), not str",
    ),
    (
        "rank_list for virtual",
        init("cpu", (2, 2), ("a", VIRTUAL), rank_list=[0, 0, 1, 1]),
        ValueError,
        "more than once",
    ),
    (
        "nobody knows the rank",
        lambda: init_device_mesh("cpu", (2,)),
        RuntimeError,
        "no rank information: a mesh of 2 rank",
    ),
    (
        "nobody knows the rank 2",
        lambda: DeviceMesh("cpu", [3]),
        RuntimeError,
        r"no rank information: .*\[3\].*torchrun",
    ),
    ("no current mesh", get_current_mesh, RuntimeError, "no mesh is current: enter one"),
]


@pytest.mark.parametrize(
    ("call", "error", "message"), [pytest.param(*row[1:], id=row[0]) for row in CONSTRUCTION]
)
def test_a_mesh_that_cannot_be_is_refused(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert type(caught.value) is error
