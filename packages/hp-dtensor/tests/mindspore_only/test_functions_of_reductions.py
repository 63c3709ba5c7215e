"""Functions of mindspore.mint and mindspore.ops, which end in primitives, on DTensors."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, mint, ops

from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_dtensor._mindspore.composed.along import moment
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

sys.path.append(str(Path(__file__).parent))
from spelled import check_call

# Sums of 20 numbers below 1 in float32, which MindSpore's kernels on CPU take.
TOLERANCE = 1e-5

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda x, flags: mint.sum(x, 0),
    "mean": lambda x, flags: mint.mean(x, 0),
    "prod": lambda x, flags: mint.prod(x, 0),
    "max": lambda x, flags: mint.max(x),
    "max along a dim": lambda x, flags: mint.max(x, 0),
    "min along a dim": lambda x, flags: mint.min(x, 0),
    "amax": lambda x, flags: ops.amax(x, 0),
    "amin": lambda x, flags: ops.amin(x, 0),
    "any": lambda x, flags: mint.any(flags, 0),
    "all": lambda x, flags: ops.all(flags, 0),
    "softmax": lambda x, flags: mint.nn.functional.softmax(x, -1),
    "softmax along a cut": lambda x, flags: ops.softmax(x, 0),
    "log_softmax": lambda x, flags: ops.log_softmax(x, 1),
    "logsumexp": lambda x, flags: ops.logsumexp(x, 0),
    "nansum": lambda x, flags: mint.nansum(x, 0),
    "norm": lambda x, flags: ops.norm(x),
    "squared errors": lambda x, flags: ops.mse_loss(x, x * 2),
    "cumsum": lambda x, flags: ops.cumsum(x, 0),
    "cumprod": lambda x, flags: ops.cumprod(x, 0),
    "cumprod of those before": lambda x, flags: ops.CumProd(exclusive=True)(x, 0),
    "cumprod from the end": lambda x, flags: ops.CumProd(reverse=True)(x, 0),
    "cumprod of those behind": lambda x, flags: ops.CumProd(exclusive=True, reverse=True)(x, 1),
    "cummax": lambda x, flags: ops.cummax(x, 0),
}


@distributed(world_size=2, backends="mindspore")
def test_functions_give_the_values_of_the_unsharded_tensors(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    x = Tensor(np.random.RandomState(0).rand(5, 4).astype(np.float32))
    for name, call in CALLS.items():
        whole = call(x, x > 0.5)
        found = call(*(distribute_tensor(part, mesh, [Shard(0)]) for part in (x, x > 0.5)))
        for own, expected in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, whole)), strict=True):
            assert_parity(own.full_tensor(), expected, rtol=TOLERANCE, atol=TOLERANCE, name=name)


@distributed(world_size=2, backends="mindspore")
def test_the_gradient_of_a_running_product_is_right_where_elements_are_zero(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    x = np.array([[2.0, 0.5, 0.0], [0.0, -3.0, 0.0], [4.0, 0.0, 2.0], [0.0, 5.0, 3.0], [7.0, 2.0, 4.0]])
    weights = np.arange(15.0).reshape(5, 3) + 1
    # By the definition: the derivative of a product by one factor is the product of the others.
    expected = np.zeros_like(x)
    for i in range(5):
        for j in range(i, 5):
            expected[i] += weights[j] * np.prod(np.delete(x[: j + 1], i, axis=0), axis=0)
    for call in (lambda x: x.cumprod(0), lambda x: ops.cumprod(x, 0), lambda x: ops.CumProd()(x, 0)):
        for placement in (Shard(0), Shard(1), Replicate()):
            leaf = Parameter(distribute_tensor(Tensor(x), mesh, [placement]))
            y = call(leaf)
            assert_parity(y.detach(), Tensor(np.cumprod(x, axis=0)), exact=True)
            (y * distribute_tensor(Tensor(weights), mesh, [Replicate()])).sum().backward()
            assert_parity(leaf.grad, Tensor(expected), atol=1e-12, name=f"{placement}")


@distributed(world_size=2, backends="mindspore")
def test_moments_come_with_their_means_and_gradients(world: World) -> None:
    values = Tensor(np.random.RandomState(0).randn(5, 3))
    for call, is_root in ((mint.var_mean, False), (mint.std_mean, True)):
        check_call(
            world,
            f"{call.__name__} along a dim",
            lambda x, call=call: call(x, 0),
            lambda x, is_root=is_root: (moment(x, 0, 1, False, is_root), mint.mean(x, 0)),
            [values],
        )
        check_call(
            world,
            f"{call.__name__} of all",
            lambda x, call=call: call(x, None, correction=0, keepdim=True),
            lambda x, is_root=is_root: (moment(x, None, 0, True, is_root), mint.mean(x, (0, 1), True)),
            [values],
        )
