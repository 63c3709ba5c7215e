"""A small transformer with dropout, and how its steps are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hp_platform import default_random_stream
from hp_platform.draws import Region
from hp_platform.testing import World

WIDTH = 6


def real(world: World) -> str:
    """The most exact dtype that the device computes in."""
    return "float64" if world.platform.supports("float64_compute", world.device) else "float32"


def make_blocks(world: World, number: int = 3) -> list[Any]:
    """Attention with dropout, and two products, of which the first activations are views of one memory."""
    platform, random = world.platform, np.random.default_rng(0)
    dtype = real(world)

    class Block(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.look: Callable[[], None] | None = None
            """Called when all is saved that is."""
            for name, shape in {
                "qkv": (3 * WIDTH, WIDTH),
                "out": (WIDTH, WIDTH),
                "up": (2 * WIDTH, WIDTH),
                "down": (WIDTH, 2 * WIDTH),
            }.items():
                values = platform.tensor(random.uniform(-1, 1, shape), dtype, world.device)
                setattr(self, name, platform.parameter(values))

        def dropped(self, x: Any) -> Any:
            place = default_random_stream().next()
            ones = platform.full(tuple(x.shape), 1.0, x.dtype, platform.device_of(x))
            return x * platform.dropout(ones, 0.5, place.seed, place.number, Region.whole(tuple(x.shape)))

        def forward(self, x: Any) -> Any:
            q, k, v = platform.split(platform.linear(platform.sin(x), self.qkv), [WIDTH] * 3, 1)
            scores = platform.softmax(platform.matmul(q, platform.transpose(k, 0, 1)))
            x = x + self.dropped(platform.linear(platform.matmul(scores, v), self.out))
            y = x + platform.linear(platform.gelu(platform.linear(x, self.up)), self.down)
            if self.look is not None:
                self.look()
            return y

    return [Block() for _ in range(number)]


def step(
    world: World, call: Callable[[Any, Any], Any], blocks: Sequence[Any], order: Sequence[int] = (0,)
) -> list[Any]:
    """Outputs and gradients of micro-batches whose forwards run one after the other, and whose backwards in ``order``."""
    platform = world.platform
    default_random_stream().manual_seed(5)
    random = np.random.default_rng(1)
    inputs = [
        platform.set_requires_grad_(
            platform.tensor(random.uniform(-1, 1, (4, WIDTH)), real(world), world.device), True
        )
        for _ in order
    ]
    for block in blocks:
        for _, parameter in platform.named_parameters(block):
            platform.set_grad(parameter, None)
    losses = []
    for x in inputs:
        for block in blocks:
            x = call(block, x)
        losses.append(platform.sum(x * x))
    found = [platform.to_numpy(platform.detach(loss)) for loss in losses]
    for index in order:
        platform.backward([losses[index]])
    leaves = [*inputs, *(p for block in blocks for _, p in platform.named_parameters(block))]
    return [*found, *(platform.to_numpy(platform.get_grad(x)) for x in leaves)]


def plain(block: Any, x: Any) -> Any:
    """The call that is the oracle."""
    return block(x)


def assert_equal(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """To the bit."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def an_input(world: World, *shape: int) -> Any:
    """The same values each time, of which a gradient is asked for."""
    values = np.random.default_rng(3).uniform(-1, 1, shape or (4, WIDTH))
    return world.platform.set_requires_grad_(world.platform.tensor(values, real(world), world.device), True)
