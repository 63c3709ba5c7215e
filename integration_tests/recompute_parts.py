"""What tests of recompute and swap with other packages share: small models, and comparisons to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hp_dtensor import DTensor, parallelize_module
from hp_fsdp import fully_shard
from hp_platform import init_device_mesh
from hp_platform.testing import World
from hp_tp import ColwiseParallel, ModuleCuts, RowwiseParallel


def widest(world: World) -> str:
    """The widest dtype in which the device computes."""
    return "float64" if world.platform.supports("float64_compute", world.device) else "float32"


def whole(x: Any) -> Any:
    """The whole of a DTensor; a plain tensor as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    """The same arrays, to the bit."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def stack(world: World, make_block: Callable[[], Any], num_blocks: int) -> Any:
    """A module of ``blocks``, one after the other."""
    platform = world.platform

    class Model(platform.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = platform.ModuleList([make_block() for _ in range(num_blocks)])

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return x

    return Model()


def stack_of_two_layers(world: World, forward: Callable[[Any, Any], Any], num_blocks: int) -> Any:
    """Blocks of two linear layers, ``up`` (6, 4) and ``down`` (4, 6), without biases; ``forward(block, x)`` is what they do."""
    platform, random = world.platform, np.random.default_rng(0)

    class Layer(platform.Module):  # type: ignore[name-defined]
        def __init__(self, rows: int, columns: int) -> None:
            super().__init__()
            values = platform.tensor(random.uniform(-0.5, 0.5, (rows, columns)), widest(world), world.device)
            self.weight = platform.parameter(values)

        def forward(self, x: Any) -> Any:
            return platform.linear(x, self.weight)

    class Block(platform.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = Layer(6, 4), Layer(4, 6)

        def forward(self, x: Any) -> Any:
            return forward(self, x)

    return stack(world, Block, num_blocks)


def in_units(
    world: World, model: Any, wrap: Callable[[Any], Any] | None = None, *, inside: bool = True, **options: Any
) -> Any:
    """Blocks and the model as units; the blocks are wrapped before (``inside`` of units) or after they are sharded."""
    mesh = init_device_mesh(world.device_type, (world.size,))
    for block in model.blocks:
        if wrap is not None and inside:
            wrap(block)
        fully_shard(block, mesh, **options)
        if wrap is not None and not inside:
            wrap(block)
    return fully_shard(model, mesh, **options)


def in_styles(world: World, model: Any, wrap: Callable[[Any], Any]) -> Any:
    """Layers ``up`` by columns, ``down`` by rows; then the blocks are wrapped."""
    mesh = init_device_mesh(world.device_type, (world.size,))
    plan = {
        "blocks.*.up": ColwiseParallel(cuts=ModuleCuts({"weight": 0})),
        "blocks.*.down": RowwiseParallel(cuts=ModuleCuts({"weight": 1})),
    }
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        wrap(block)
    return model
