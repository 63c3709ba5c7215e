"""What ``max_norm`` may be, and what an infinite one or an infinite norm does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hp_dtensor import Shard, distribute_tensor
from hp_optim import clip_grad_norm_
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed


def parameters(world: World, *gradients: list[float]) -> list[Any]:
    """Plain ones, and (the last) a DTensor over all ranks."""
    platform, found = world.platform, []
    mesh = init_device_mesh(world.device_type, (world.size,))
    for number, values in enumerate(gradients, 1):
        gradient = platform.tensor(np.array(values), "float32", world.device)
        if number < len(gradients):
            parameter = platform.parameter(platform.zeros_like(gradient))
            platform.set_grad(parameter, gradient)
        else:
            parameter = distribute_tensor(platform.zeros_like(gradient), mesh, [Shard(0)]).requires_grad_()
            parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        found.append(parameter)
    return found


def gradients_of(world: World, given: list[Any]) -> list[np.ndarray]:
    platform = world.platform
    *plain, last = given
    return [
        *(platform.to_numpy(platform.get_grad(each)) for each in plain),
        platform.to_numpy(last.grad.full_tensor()),
    ]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@distributed(world_size=(1, 2))
def test_a_limit_in_a_tensor_is_the_limit(world: World, shape: tuple[int, ...], dtype: str) -> None:
    for limit in (0.5, 100.0):
        by_number, by_tensor = [parameters(world, [3.0], [0.0, 4.0, 0.0]) for _ in range(2)]
        given = world.platform.full(shape, limit, dtype, world.device)
        norms = [clip_grad_norm_(by_number, limit), clip_grad_norm_(by_tensor, given)]
        assert [float(world.platform.to_numpy(norm)) for norm in norms] == [5.0, 5.0]
        for mine, theirs in zip(gradients_of(world, by_tensor), gradients_of(world, by_number), strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert abs(gradients_of(world, by_tensor)[0][0] - 3.0 * min(1.0, limit / 5)) < 1e-5


@distributed(world_size=(1, 2))
def test_an_infinite_limit_scales_nothing_unless_the_norm_is_infinite(world: World) -> None:
    for limit in (math.inf, world.platform.full((), math.inf, "float32", world.device)):
        given = parameters(world, [3.0], [0.0, 4.0])
        clip_grad_norm_(given, limit)
        assert [x.tolist() for x in gradients_of(world, given)] == [[3.0], [0.0, 4.0]]
        given = parameters(world, [3.0], [0.0, math.inf])
        assert float(world.platform.to_numpy(clip_grad_norm_(given, limit))) == math.inf
        assert all(np.isnan(x).all() for x in gradients_of(world, given))
