"""MindSpore's functions that take apart, cut out and pad, on DTensors: values and gradients of the unsharded tensors."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, mint, ops

from hp_dtensor import Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed

sys.path.append(str(Path(__file__).parent))
from spelled import check_call

F = mint.nn.functional
X = np.random.RandomState(0).randn(6, 4)
BOX = np.random.RandomState(1).randn(3, 2, 4)
NUMBERS = Tensor(np.array([[1, 0, 3, 2]] * 6))
SOURCE = Tensor(np.random.RandomState(2).randn(6, 4))


def _padded(x: Any, value: float) -> Any:
    """One column before and two after."""
    before, after = (Tensor(np.full((6, n), value)) for n in (1, 2))
    return mint.cat([before, x, after], 1)


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Any]] = {
    "ops split": (lambda x: ops.split(x, 2, 0), lambda x: mint.split(x, 2, 0), X),
    "Split": (lambda x: ops.Split(1, 2)(x), lambda x: mint.split(x, 2, 1), X),
    "ops split by sizes": (lambda x: ops.split(x, [1, 5], 0), lambda x: mint.split(x, [1, 5], 0), X),
    "ops chunk": (lambda x: ops.chunk(x, 3, 0), lambda x: mint.split(x, 2, 0), X),
    "ops unstack": (lambda x: ops.unstack(x, 1), lambda x: ops.unstack(x, 1), X),
    "ops flatten": (ops.flatten, lambda x: x.reshape((3, 8)), BOX),
    "ops slice": (
        lambda x: ops.slice(x, (1, 0), (3, 2)),
        lambda x: mint.narrow(mint.narrow(x, 0, 1, 3), 1, 0, 2),
        X,
    ),
    "ops narrow": (lambda x: ops.narrow(x, 0, 2, 3), lambda x: mint.narrow(x, 0, 2, 3), X),
    "ops tril": (lambda x: ops.tril(x, 1), lambda x: x * Tensor(np.tri(6, 4, 1)), X),
    "mint tril": (lambda x: mint.tril(x, -1), lambda x: x * Tensor(np.tri(6, 4, -1)), X),
    "mint repeat_interleave": (
        lambda x: mint.repeat_interleave(x, 2, 0),
        lambda x: ops.repeat_interleave(x, 2, 0),
        X,
    ),
    "mint pad": (lambda x: F.pad(x, (1, 2)), lambda x: ops.pad(x, (1, 2)), X),
    "ops pad": (lambda x: ops.pad(x, (1, 2), value=2.5), lambda x: _padded(x, 2.5), X),
    "mint gelu": (F.gelu, lambda x: ops.gelu(x, approximate="none"), X),
    "mint gelu, by tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: ops.gelu(x, approximate="tanh"),
        X,
    ),
    "mint scatter": (
        lambda x: mint.scatter(x, 1, NUMBERS, SOURCE),
        lambda x: mint.scatter(x, 1, NUMBERS, SOURCE),
        X,
    ),
    "mint scatter_add": (
        lambda x: mint.scatter_add(x, 0, NUMBERS, SOURCE),
        lambda x: ops.tensor_scatter_elements(x, NUMBERS, SOURCE, 0, "add"),
        X,
    ),
    "ops swiglu": (
        ops.swiglu,
        lambda x: F.silu(mint.narrow(x, 1, 0, 2)) * mint.narrow(x, 1, 2, 2),
        X,
    ),
    "mint any": (lambda x: mint.any(x > 2), lambda x: mint.any(x > 2), X),
    "ops expand_dims": (lambda x: ops.expand_dims(x, 1), lambda x: mint.unsqueeze(x, 1), X),
    "Tensor.expand_dims": (lambda x: x.expand_dims(0), lambda x: mint.unsqueeze(x, 0), X),
}


@distributed(2, backends="mindspore")
def test_functions_of_mindspore_give_values_and_gradients_of_the_unsharded_tensors(world: World) -> None:
    for name, (call, expected, array) in CALLS.items():
        check_call(world, name, call, expected, [Tensor(array)])


@distributed(1, backends="mindspore")
def test_parts_that_are_not_equal_are_refused(world: World) -> None:
    x = distribute_tensor(Tensor(X), init_device_mesh(world.device_type, (1,)), [Shard(0)])
    with pytest.raises(ValueError, match="4 equal parts of a dim of size 6"):
        ops.Split(0, 4)(x)
