"""A small model of torch's own layers, and the two ways to train it: sharded, and in one process on all ranks' samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hp_fsdp import fully_shard
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World

CLOSE = {"rtol": 0.0, "atol": 1e-12}
"""Sums over ranks and samples in another order than in one process: float64, values near 1, a few steps."""
TORCH = ("torch", "cuda")
VOCABULARY, WIDTH, SAMPLES = 11, 6, 2
"""On 4 ranks 11 rows are cut to 3, 3, 3, 2, and 6 rows to 2, 2, 2, 0. Each rank has two samples."""


class Block(torch.nn.Module):
    """``x + outer(gelu(inner(norm(x))))``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.inner = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.nn.functional.gelu(self.inner(self.norm(x))))


class Model(torch.nn.Module):
    """Ids to logits: a tied embedding, two blocks, a scalar, and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.scale = torch.nn.Parameter(torch.tensor(0.9))
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def make(world: World) -> Model:
    """The same numbers at every call, in float64."""
    torch.manual_seed(3)
    return Model().double().to(world.device)


def make_mesh(world: World, replicas: int = 1) -> DeviceMesh:
    """1-D over the world, or 2-D (replicas, shards)."""
    shape = (world.size,) if replicas == 1 else (replicas, world.size // replicas)
    return init_device_mesh(world.device_type, shape)


def shard(model: Any, mesh: DeviceMesh, **kwargs: Any) -> Any:
    """A unit for each block, and one for the rest."""
    for block in model.blocks:
        fully_shard(block, mesh, **kwargs)
    return fully_shard(model, mesh, **kwargs)


def batch(world: World, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' samples, and this rank's."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (SAMPLES * world.size, 5), generator=generator).to(world.device)
    return ids, ids[SAMPLES * world.rank : SAMPLES * (world.rank + 1)]


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())


def gradients(model: torch.nn.Module) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def parameters(model: torch.nn.Module) -> dict[str, Any]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def meshes(world: World) -> Iterator[DeviceMesh]:
    """1-D, and on 4 ranks also (2, 2)."""
    yield make_mesh(world)
    if world.size == 4:
        yield make_mesh(world, 2)
