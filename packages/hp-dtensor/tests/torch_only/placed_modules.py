"""Parameters that are DTensors, and a module with them."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hp_dtensor import Placement, Replicate, Shard, distribute_tensor
from hp_platform.testing import World

sys.path.insert(0, str(Path(__file__).parent))
from placed_tensors import make_mesh, whole_of

ROWS = Shard(0)


def parameter_of(world: World, *shape: int, at: Placement = ROWS) -> Any:
    return nn.Parameter(distribute_tensor(whole_of(world, *shape), make_mesh(world), [at]))


def linear_of(world: World) -> Any:
    module = nn.Linear(5, 3, dtype=torch.float64, device=world.device)
    module.weight, module.bias = parameter_of(world, 3, 5), parameter_of(world, 3, at=Replicate())
    return module


def loss_of(module: Any, world: World) -> Any:
    return module(distribute_tensor(whole_of(world, 7, 5), make_mesh(world))).square().sum()
