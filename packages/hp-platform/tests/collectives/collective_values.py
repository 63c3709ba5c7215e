"""What the ranks contribute to collectives, and numpy's results.

Values are small integers, exact in every dtype and in any order of summation, so every comparison is bit-equal. The one
rounding is that of a mean over three ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hp_platform import ProcessGroup, collectives, init_device_mesh
from hp_platform.testing import World

DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool")
LAYOUTS = ("contiguous", "transposed", "empty", "vector")
MOVES = (False, True)
# 4 ranks make a 2x2 mesh with groups of 4 and 2; 3 ranks a 1x3 mesh with groups of 3 and 1.
WORLDS = (3, 4)


def groups(world: World) -> Iterator[ProcessGroup]:
    """The world, and the groups of a 2-D mesh that hold this rank."""
    rows = 2 if world.size == 4 else 1
    mesh = init_device_mesh(world.device_type, (rows, world.size // rows), mesh_dim_names=("row", "column"))
    assert world.group is not None
    yield world.group
    yield mesh.get_group("row")
    yield mesh.get_group("column")


def value(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """What a rank contributes, as the numpy dtype that represents ``dtype`` on the host."""
    numbers = (np.arange(int(np.prod(shape))).reshape(shape) % 3 + rank) % 4
    return (numbers % 2 == 1) if dtype == "bool" else numbers.astype(host(dtype))


def host(dtype: str) -> str:
    """numpy has no bfloat16; the platform hands it over as float32, exactly."""
    return "float32" if dtype == "bfloat16" else dtype


def shape_of(layout: str, rows: int) -> tuple[int, ...]:
    return {"contiguous": (rows, 3), "transposed": (rows, 3), "empty": (0, 3), "vector": (rows,)}[layout]


def tensor(world: World, array: np.ndarray, dtype: str, layout: str = "contiguous") -> Any:
    """The array on the device; ``transposed``: the same values behind a view that is not contiguous."""
    platform = world.platform
    if layout != "transposed":
        return platform.tensor(array, dtype, world.device)
    return platform.transpose(platform.tensor(np.ascontiguousarray(array.T), dtype, world.device), 0, 1)


def same(world: World, actual: Any, expected: np.ndarray, dtype: str) -> None:
    assert world.platform.dtype_name(actual.dtype) == dtype
    assert tuple(actual.shape) == expected.shape
    np.testing.assert_array_equal(world.platform.to_numpy(actual), expected)


def run(async_op: bool, collective: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """The result of a collective, by either way."""
    if not async_op:
        return collective(*arguments, **keywords, async_op=False)
    work = collective(*arguments, **keywords, async_op=True)
    first = work.wait()
    assert work.wait() is first
    assert work.is_completed()
    return first


NUMPY = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}


def reduced(op: str, arrays: list[np.ndarray], dtype: str) -> np.ndarray:
    if dtype == "bool":
        return np.any(arrays, 0) if op == "max" else np.all(arrays, 0)
    return NUMPY[op](np.stack(arrays).astype("float64"), axis=0).astype(host(dtype))


def refused(world: World, dtype: str) -> bool:
    """Whether this backend must refuse reductions of the dtype, and does, with a clear text."""
    platform = world.platform
    if platform.can_reduce(platform.dtype("uint8" if dtype == "bool" else dtype), world.device_type):
        return False
    assert dtype == "float64" and not platform.supports("reduce_float64", world.device_type)
    if world.size > 1:
        with pytest.raises(NotImplementedError, match="cannot reduce float64 on .*cast to float32"):
            collectives.all_reduce(tensor(world, value(0, (2,), dtype), dtype))
    return True
