"""A checkpointed call is the plain call: values, gradients, random numbers; and it keeps only its arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hp_platform.testing import World, distributed
from hp_recompute import CheckpointError, checkpoint


class Parts:
    """Weights and an input, the same for every call with the same seed."""

    def __init__(self, world: World, seed: int = 0) -> None:
        self.platform, self.device = world.platform, world.device
        random = np.random.default_rng(seed)
        platform = world.platform
        self.dtype = platform.dtype(
            "float64" if platform.supports("float64_compute", self.device) else "float32"
        )

        def made(*shape: int) -> Any:
            return platform.tensor(random.uniform(-1, 1, shape), self.dtype, self.device)

        self.weights = [platform.parameter(made(4, 4)) for _ in range(3)]
        self.x = platform.set_requires_grad_(made(3, 4), True)

    def layer(self, x: Any, number: int) -> Any:
        platform = self.platform
        return platform.gelu(platform.matmul(platform.sin(x), self.weights[number]))

    def gradients(self) -> list[Any]:
        return [self.platform.to_numpy(self.platform.get_grad(x)) for x in (self.x, *self.weights)]


def compared(world: World, run: Any, plain: Any) -> None:
    """``run(parts)`` and ``plain(parts)`` have the same values and gradients to the bit."""
    found = []
    for program in (run, plain):
        parts = Parts(world)
        y = program(parts)
        parts.platform.backward([parts.platform.sum(y * y)])
        found.append([parts.platform.to_numpy(parts.platform.detach(y)), *parts.gradients()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def plain(parts: Parts) -> Any:
    x = parts.x
    for number in range(3):
        x = parts.layer(x, number)
    return x


@distributed(world_size=1)
def test_values_and_gradients_are_those_of_the_plain_call(world: World) -> None:
    for early_stop in (True, False):

        def run(parts: Parts, early_stop: bool = early_stop) -> Any:
            x = parts.x
            for number in range(3):
                x = checkpoint(parts.layer, x, number, early_stop=early_stop)
            return x

        compared(world, run, plain)


@distributed(world_size=1)
def test_checkpoints_nest(world: World) -> None:
    def inner(parts: Parts, x: Any, first: int) -> Any:
        for number in range(first, 3):
            x = checkpoint(parts.layer, x, number)
        return x

    def run(parts: Parts) -> Any:
        return checkpoint(lambda x: checkpoint(inner, parts, parts.layer(x, 0), 1), parts.x)

    compared(world, run, plain)


@distributed(world_size=1)
def test_a_function_runs_twice_and_stops_when_all_is_there(world: World) -> None:
    parts, calls = Parts(world), []

    def function(x: Any) -> Any:
        calls.append("begin")
        y = parts.layer(x, 0)
        calls.append("end")
        return y

    platform = world.platform
    platform.backward([platform.sum(checkpoint(function, parts.x))])
    assert calls == ["begin", "end", "begin"]
    with platform.no_grad():
        checkpoint(function, parts.x)
    assert calls[3:] == ["begin", "end"]


@distributed(world_size=1)
def test_a_second_run_that_differs_is_told(world: World) -> None:
    platform, count = world.platform, []

    def counting(x: Any) -> Any:
        count.append(0)
        return platform.sin(x) if len(count) % 2 else platform.sin(platform.sum(x, 0))

    parts = Parts(world)
    with pytest.raises(CheckpointError, match="saved tensor 0 of a checkpointed function is"):
        platform.backward([platform.sum(checkpoint(counting, parts.x))])
    if platform.supports("operation_dispatch", world.device):
        with pytest.raises(CheckpointError, match="operation 0 of a checkpointed function is .*sum.*sin"):
            platform.backward([platform.sum(checkpoint(counting, parts.x, determinism_check="operations"))])
