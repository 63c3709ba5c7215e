"""Losses that contain gradients of the model itself, as penalties on gradients do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_fsdp import fully_shard
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from torch_models import CLOSE, TORCH, make_mesh


def make(world: World) -> torch.nn.Sequential:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)]
    return torch.nn.Sequential(*layers).double().to(world.device)


def shard(model: torch.nn.Sequential, world: World, replicas: int, **kwargs: Any) -> Any:
    mesh = make_mesh(world, replicas)
    fully_shard(model[0], mesh, **kwargs)
    return fully_shard(model, mesh, **kwargs)


def loss_of(model: torch.nn.Module, rank: int, batch: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * batch + rank)
    x = torch.randn(3, 4, dtype=torch.float64, generator=generator).to(device).requires_grad_()
    value = model(x).tanh().square().mean()
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    return value + gradient.square().sum()


@pytest.mark.parametrize("reshard", [True, False])
@distributed(world_size=(2, 3), backends=TORCH)
def test_a_penalty_on_gradients_trains_as_in_one_process(world: World, reshard: bool) -> None:
    model, reference = shard(make(world), world, 1, reshard_after_forward=reshard), make(world)
    model.set_reshard_after_backward(False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for batch in range(3):
        loss_of(model, world.rank, batch, world.device).backward()
        losses = [loss_of(reference, rank, batch, world.device) for rank in range(world.size)]
        torch.stack(losses).mean().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert_parity(ours.grad.full_tensor(), theirs.grad, **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@distributed(world_size=2, backends=TORCH)
def test_a_recorded_backward_that_would_free_parameters_is_refused(world: World) -> None:
    model = shard(make(world), world, 1)
    with pytest.raises(RuntimeError, match=r"recorded .*has come to .*set_reshard_after_backward\(False\)"):
        loss_of(model, world.rank, 0, world.device)
    model.zero_grad()
    model.set_reshard_after_backward(False)
    reference = make(world)
    loss_of(model, 0, 0, world.device).backward()
    loss_of(reference, 0, 0, world.device).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_parity(ours.grad.full_tensor(), theirs.grad, **CLOSE)


@distributed(world_size=2, backends=TORCH)
def test_replicas_have_nothing_to_free(world: World) -> None:
    model, reference = shard(make(world), world, world.size), make(world)
    for each in (model, reference):
        loss_of(each, 0, 0, world.device).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert_parity(ours.grad.full_tensor(), theirs.grad, **CLOSE)
