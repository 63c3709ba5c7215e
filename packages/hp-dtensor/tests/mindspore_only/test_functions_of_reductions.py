"""Functions of mindspore.mint and mindspore.ops, which end in primitives, on DTensors."""

from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor, mint, ops

from hp_dtensor import Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

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
