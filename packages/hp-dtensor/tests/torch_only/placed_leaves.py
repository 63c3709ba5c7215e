"""Leaves of a small program, plain and as DTensors, and a foreign Function."""

import sys
from pathlib import Path
from typing import Any

import torch

from hp_dtensor import Placement, distribute_tensor
from hp_platform.testing import World

sys.path.insert(0, str(Path(__file__).parent))
from placed_tensors import make_mesh


class Cube(torch.autograd.Function):
    """Saves its input; its second derivative goes through what is saved."""

    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * x * factor

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        assert type(g) is type(x)
        return g * x * x * 3 * ctx.factor, None


def inputs_of(world: World) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(world.device) * 0.4
        for shape in ((7, 5), (6, 5))
    ]


def placed_leaves(world: World, *at: Placement) -> list[Any]:
    mesh = make_mesh(world)
    return [
        distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(inputs_of(world), at, strict=True)
    ]


def plain_leaves(world: World) -> list[torch.Tensor]:
    return [t.requires_grad_() for t in inputs_of(world)]
