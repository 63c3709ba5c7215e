"""Linear layers of the framework on meshes of two dims, and how what they give is put together."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from hp_dtensor import (
    DTensor,
)
from hp_platform import init_device_mesh
from hp_platform.testing import World

ROWS_BY_COLUMNS = {
    1: [(1, 1)],
    2: [(1, 2), (2, 1)],
    3: [(1, 3), (3, 1)],
    4: [(2, 2), (1, 4), (4, 1)],
}


def dtype_of(world: World) -> str:
    return "float64" if world.platform.supports("float64_compute", world.device) else "float32"


def tolerance(world: World) -> dict[str, float]:
    """Sums of at most 30 products of numbers below 1, in another order than in one process."""
    return {"rtol": 0.0, "atol": 1e-13 if dtype_of(world) == "float64" else 1e-5}


def stock_linear(world: World, inside: int, out: int, bias: bool = True) -> Any:
    """The framework's own layer, with values that depend on its sizes only."""
    platform = world.platform
    name = {"torch": "torch", "mindspore": "mindspore.mint"}[platform.platform_type.value]
    layer = importlib.import_module(name).nn.Linear(inside, out, bias=bias)
    random = np.random.default_rng(inside * 100 + out)
    for attribute, shape in (("weight", (out, inside)), ("bias", (out,))):
        if attribute == "weight" or bias:
            values = platform.tensor(random.uniform(-0.5, 0.5, shape), dtype_of(world), world.device)
            platform.set_parameter(layer, attribute, platform.parameter(values))
    return layer


def numbers(world: World, *shape: int, seed: int = 0) -> Any:
    values = np.random.default_rng(seed).uniform(-1.0, 1.0, shape)
    return world.platform.tensor(values, dtype_of(world), world.device)


def leaf(world: World, x: Any) -> Any:
    return world.platform.set_requires_grad_(world.platform.clone(world.platform.detach(x)), True)


def mesh_of(world: World, shape: tuple[int, int]) -> Any:
    return init_device_mesh(world.device_type, shape, mesh_dim_names=("tp_r", "tp_c"))


def whole(x: Any, mesh: Any, placements: Any, shape: tuple[int, ...]) -> Any:
    return DTensor.from_local(x, mesh, placements, shape=shape).full_tensor()


def gradients(world: World, layer: Any) -> dict[str, Any]:
    platform = world.platform
    found = {
        name: p.grad if hasattr(p, "_spec") else platform.get_grad(p)
        for name, p in platform.named_parameters(layer)
    }
    return {name: g.full_tensor() if hasattr(g, "_spec") else g for name, g in found.items()}
