"""Gradients of inputs alone (torch.autograd.grad) leave none in parameters, also where weights' gradients come apart."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from torch_models import TORCH, make_mesh


@pytest.mark.parametrize("wide", [False, True])
@distributed(world_size=2, backends=TORCH)
def test_gradients_of_inputs_leave_parameters_alone(world: World, wide: bool) -> None:
    policy = MixedPrecisionPolicy("bfloat16", "float32", weight_grads_in_reduce_dtype=wide)
    torch.manual_seed(3)
    layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(2)]
    model, mesh = torch.nn.Sequential(*layers).to(world.device), make_mesh(world)
    fully_shard(model[0], mesh, mp_policy=policy)
    fully_shard(model, mesh, mp_policy=policy)
    x = torch.full((3, 4), 0.5, device=world.device, requires_grad=True)

    def trained() -> list[torch.Tensor]:
        model(x).float().square().mean().backward()
        found = [parameter.grad.full_tensor() for parameter in model.parameters()]
        model.zero_grad()
        return found

    before = trained()
    (gradient,) = torch.autograd.grad(model(x).float().square().mean(), x)
    assert gradient.any()
    assert all(parameter.grad is None for parameter in model.parameters())
    for value, expected in zip(trained(), before, strict=True):
        assert torch.equal(value, expected)
