"""Tensors of torch that every rank makes alike, their DTensors over all ranks, and what the tests of these say alike."""

from __future__ import annotations

from typing import Any

import torch

from hp_dtensor import Partial, Placement, Replicate, Shard, distribute_tensor
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, assert_parity

TORCH = ("torch", "cuda")
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
TOLERANCE = 1e-12
"""Some products of some tens of numbers near 1, in float64."""


def assert_equal(found: Any, expected: Any, name: str = "value") -> None:
    """Within :data:`TOLERANCE`."""
    assert_parity(found, expected, rtol=TOLERANCE, atol=TOLERANCE, name=name)


def make_mesh(world: World) -> DeviceMesh:
    """All ranks in one dim."""
    return init_device_mesh(world.device_type, (world.size,))


def whole_of(world: World, *shape: int) -> torch.Tensor:
    """Normal numbers in float64, equal on all ranks; the same for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(world.device)


def cut(world: World, *shape: int, at: Placement = Shard(0)) -> Any:  # noqa: B008
    """:func:`whole_of` as a DTensor."""
    return distribute_tensor(whole_of(world, *shape), make_mesh(world), [at])
