"""Layers behind a door that puts products off, and what is done without putting off and with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from hp_dtensor import Shard
from hp_platform.testing import World
from hp_tp import ColwiseParallel, parallelize_module
from hp_tp.styles import put_off

sys.path.insert(0, str(Path(__file__).parent))
from style_layers import loss_of
from tp_models import Maker
from tp_training import local

BACKENDS = ("torch", "cuda", "npu")
"""Those whose order of backward can be changed."""
NEVER, ALWAYS = 2**60, 0
FEATURES, LENGTH = 6, 8


@contextmanager
def put_off_from(nbytes: int) -> Iterator[None]:
    """From which size of an input on."""
    with patch.object(put_off, "MIN_NBYTES", nbytes):
        yield


def both(run: Callable[[], Any]) -> tuple[Any, Any]:
    """Without and with putting off."""
    with put_off_from(NEVER):
        plain = run()
    with put_off_from(ALWAYS):
        return plain, run()


def assert_same_bits(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected) > 0
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_array_equal(one, other, err_msg=str(place))


def gradients(world: World, module: Any) -> list[Any]:
    """This rank's, of the parameters that have one."""
    platform = world.platform
    found = [platform.get_grad(local(p)) for _, p in platform.named_parameters(module)]
    return [platform.to_numpy(g) for g in found if g is not None]


def layers_of(world: World, mesh: Any, layout: Any, number: int = 3) -> Any:
    """Column-wise layers with biases."""
    maker = Maker(world)
    layers = [maker.linear(FEATURES, FEATURES * world.size) for _ in range(number)]
    for layer in layers:
        parallelize_module(layer, mesh, ColwiseParallel(input_layouts=layout))
    return world.platform.ModuleList(layers)


def input_of(world: World, layout: Any) -> Any:
    """Of a batch of two: whole, or this rank's piece, which is as large."""
    rank = world.rank if layout == Shard(1) else 0
    return world.platform.set_requires_grad_(Maker(world, 3 + rank).tensor(2, LENGTH, FEATURES), True)


def mixed(world: World, layers: Any, x: Any) -> Any:
    """A number that depends on every element, and on the products of layers."""
    y = layers[0](x)
    for layer in layers[1:]:
        y = world.platform.silu(y) * layer(x)
    return loss_of(world, y)
