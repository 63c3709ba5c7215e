"""The model of the README over 200 steps: the numbers of one process, and the same ones every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hp_fsdp import fully_shard
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed

NUM_STEPS, WIDTH, SAMPLES = 200, 64, 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-1, momentum=0.9),
}


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(3)]
    return torch.nn.Sequential(*blocks).double()


def shard(model: Any, world: World, replicas: int) -> Any:
    shape = (world.size,) if replicas == 1 else (replicas, world.size // replicas)
    mesh = init_device_mesh(world.device_type, shape)
    for block in model:
        fully_shard(block, mesh)
    return fully_shard(model, mesh)


def train(model: torch.nn.Module, optimizer: str, first: int, num_samples: int) -> list[float]:
    """On samples ``first`` and those that follow it, other ones in every step; the losses."""
    chosen = OPTIMIZERS[optimizer](model.parameters())
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(NUM_STEPS):
        inputs = torch.randn(64, WIDTH, dtype=torch.float64, generator=generator)
        mine = inputs[first : first + num_samples]
        loss = (model(mine) - mine.roll(1, 1)).square().mean()
        loss.backward()
        chosen.step()
        chosen.zero_grad()
        losses.append(loss.item())
    return losses


def largest_difference(model: Any, reference: torch.nn.Module) -> float:
    """Of any parameter, relative to the largest number in it."""
    found = 0.0
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        difference = (ours.full_tensor() - theirs).abs().max() / theirs.abs().max()
        found = max(found, difference.item())
    return found


def check(world: World, optimizer: str, all_replicas: tuple[int, ...]) -> list[tuple[list[float], list[Any]]]:
    """Losses and pieces of runs on (replicas, shards), each of which equals one process."""
    reference, runs = make(), []
    train(reference, optimizer, 0, SAMPLES * world.size)
    for replicas in all_replicas:
        model = shard(make(), world, replicas)
        losses = train(model, optimizer, SAMPLES * world.rank, SAMPLES)
        assert losses[-1] < losses[0]
        # Sums over ranks and samples run in another order: rounding, which 200 steps carry on.
        assert largest_difference(model, reference) < 1e-10
        runs.append((losses, [parameter.to_local().detach().clone() for parameter in model.parameters()]))
    return runs


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@distributed(world_size=2, backends="torch")
def test_200_steps_equal_one_process_and_themselves(world: World, optimizer: str) -> None:
    (losses, pieces), (same_losses, same_pieces) = check(world, optimizer, (1, 1))
    assert losses == same_losses
    assert all(torch.equal(x, y) for x, y in zip(pieces, same_pieces, strict=True))


@distributed(world_size=4, backends="torch")
def test_200_steps_on_replicas_of_shards_equal_one_process_and_themselves(world: World) -> None:
    (losses, pieces), (same_losses, same_pieces) = check(world, "AdamW", (2, 2))
    assert losses == same_losses
    assert all(torch.equal(x, y) for x, y in zip(pieces, same_pieces, strict=True))
