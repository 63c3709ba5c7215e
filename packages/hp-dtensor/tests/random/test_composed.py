"""Cauchy, log-normal, geometric and Poisson numbers: their distributions, and that no sharding changes them."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hp_dtensor import Partial, Replicate, Shard, distribute_tensor, random
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed

COUNT = 20_000

# What is drawn into COUNT elements, and a statistic of it with its expected value. Six standard errors are below 0.06.
DRAWS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], float], float]] = {
    "half of Cauchy numbers": (
        lambda x: random.cauchy_(x, 2.0, 3.0),
        lambda v: float((abs(v - 2.0) < 3.0).mean()),
        0.5,
    ),
    "the logarithm of log-normal numbers": (
        lambda x: random.log_normal_(x, 0.25, 0.5),
        lambda v: float(np.log(v).mean()),
        0.25,
    ),
    "their spread": (lambda x: random.log_normal_(x, 0.25, 0.5), lambda v: float(np.log(v).std()), 0.5),
    "one trial": (lambda x: random.geometric_(x, 0.4), lambda v: float((v == 1).mean()), 0.4),
    "trials": (lambda x: random.geometric_(x, 0.4), lambda v: float(v.mean()), 2.5),
    "no event": (lambda x: random.poisson(x * 0 + 1.5), lambda v: float((v == 0).mean()), math.exp(-1.5)),
    "few events": (lambda x: random.poisson(x * 0 + 1.5), lambda v: float(v.mean()), 1.5),
    "many events": (lambda x: random.poisson(x * 0 + 400.0) / 400, lambda v: float(v.mean()), 1.0),
    "their variance": (lambda x: random.poisson(x * 0 + 400.0) / 20, lambda v: float(v.var()), 1.0),
}


@pytest.mark.parametrize("name", DRAWS)
@distributed(world_size=1)
def test_values_are_distributed_as_they_should(name: str, world: World) -> None:
    draw, statistic, expected = DRAWS[name]
    platform = world.platform
    random.manual_seed(11)
    values = platform.to_numpy(draw(platform.zeros((COUNT,), "float64", world.device_type)))
    assert abs(statistic(values) - expected) < 0.06


@distributed(world_size=3)
def test_every_sharding_has_the_values_of_a_plain_tensor(world: World) -> None:
    platform = world.platform
    mesh = init_device_mesh(world.device_type, (world.size,))
    whole = platform.reshape(
        platform.cast(platform.arange(1, 36, device=world.device_type), "float64"), (5, 7)
    )
    for draw, _, _ in DRAWS.values():
        random.manual_seed(2)
        expected = platform.to_numpy(draw(platform.clone(whole)))
        for placement in (Shard(0), Shard(1), Replicate()):
            random.manual_seed(2)
            found = draw(distribute_tensor(whole, mesh, [placement]))
            assert (platform.to_numpy(found.full_tensor()) == expected).all()


@distributed(world_size=1)
def test_impossible_parameters_are_named(world: World) -> None:
    x = world.platform.zeros((3,), "float32", world.device_type)
    for call, message in (
        (lambda: random.cauchy_(x, 0.0, 0.0), "needs a finite sigma above 0"),
        (lambda: random.geometric_(x, 1.0), "lies between 0 and 1, got 1.0"),
        (lambda: random.poisson(x - 1.0), "the rates of poisson lie between 0 and 500"),
        (lambda: random.poisson(x + 501.0), "the rates of poisson lie between 0 and 500"),
        (lambda: random.poisson(x + float("nan")), "the rates of poisson lie between 0 and 500"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    mesh = init_device_mesh(world.device_type, (1,))
    with pytest.raises(ValueError, match="would draw summands, not values"):
        random.poisson(distribute_tensor(x, mesh, [Replicate()]).redistribute(placements=[Partial()]))
