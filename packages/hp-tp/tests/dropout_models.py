"""Small models with dropout, for one process and under styles."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hp_dtensor import random
from hp_platform.testing import World

sys.path.insert(0, str(Path(__file__).parent))
from tp_models import Maker

WIDTH, LENGTH, BATCH, P = 6, 12, 2, 0.4
Apply = Callable[[Any, Any, float], Any]


def drops_by_layer(layer: Any, x: Any, p: float) -> Any:
    return layer(x)


def drops_by_function(layer: Any, x: Any, p: float) -> Any:
    """One process: ``hp_dtensor.random.dropout`` of a plain tensor."""
    return random.dropout(x, p)


def stock_dropout(world: World) -> Any:
    """The framework's layer, in training mode, which not every framework begins with."""
    layer = Maker(world).stock.Dropout(P)
    world.platform.set_training(layer, True)
    return layer


def feed_forward(world: World, hidden: int, drop: Apply) -> Any:
    """Two linear layers with dropout behind each, and a residual stream."""
    platform, maker = world.platform, Maker(world)

    class FeedForward(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = maker.linear(WIDTH, hidden), maker.linear(hidden, WIDTH)
            self.inner, self.outer = stock_dropout(world), stock_dropout(world)

        def forward(self, x: Any) -> Any:
            inner = drop(self.inner, platform.silu(self.up(x)), P)
            return drop(self.outer, self.down(inner), P)

    return FeedForward()


def attention(world: World, heads: int, drop: Apply) -> Any:
    """Softmax attention written out, with dropout of the probabilities."""
    platform, maker, size = world.platform, Maker(world), 2
    width = heads * size

    class Attention(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (maker.linear(WIDTH, width) for _ in range(3))
            self.o = maker.linear(width, WIDTH)
            self.drop = stock_dropout(world)

        def forward(self, x: Any) -> Any:
            q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
            scores = platform.softmax(platform.matmul(q, platform.transpose(k, 2, 3)), -1)
            mixed = platform.transpose(platform.matmul(drop(self.drop, scores, P), v), 1, 2)
            batch, length, own, _ = mixed.shape
            return self.o(platform.reshape(mixed, (batch, length, own * size)))

        def heads(self, x: Any) -> Any:
            batch, length, own = x.shape
            return platform.transpose(platform.reshape(x, (batch, length, own // size, size)), 1, 2)

    return Attention()
