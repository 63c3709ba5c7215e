"""Muon as an optimizer of torch, and beside torch's own."""

from __future__ import annotations

import torch

from hp_optim import Muon
from hp_platform.testing import World, distributed

SHAPES = [(24, 16), (16, 24), (20, 20)]


def parameters(world: World) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(world.device)) for shape in SHAPES]


def gradients(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)


@distributed(world_size=1, backends=["torch", "cuda"])
def test_it_moves_as_torchs_own_does(world: World) -> None:
    ours, theirs = parameters(world), parameters(world)
    optimizer = Muon(ours, lr=0.1, weight_decay=0.1, ns_coefficients="quintic")
    other = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        for params in (ours, theirs):
            gradients(params, step)
        optimizer.step()
        other.step()
    for a, b, start in zip(ours, theirs, parameters(world), strict=True):
        # torch keeps momentum times 0.05, which the norm takes out again: what differs is rounding to bfloat16, at 3 digits.
        assert ((a - b).norm() / (b - start).norm()).item() < 0.02


@distributed(world_size=1, backends=["torch", "cuda"])
def test_schedulers_scalers_closures_and_hooks_know_it(world: World) -> None:
    params = parameters(world)
    optimizer = Muon(params, lr=0.5, ns_dtype="float32", weight_decay=0.0)
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1**step)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum((p.square().sum() for p in params), torch.zeros((), device=world.device))
        loss.backward()
        return loss

    before = [p.detach().clone() for p in params]
    assert optimizer.step(closure).item() > 0
    scheduler.step()
    first = [(p.detach() - b).norm() for p, b in zip(params, before, strict=True)]
    before = [p.detach().clone() for p in params]
    optimizer.step(closure)
    assert seen == ["before", "after"] * 2
    for p, b, size in zip(params, before, first, strict=True):
        assert 0.05 < ((p.detach() - b).norm() / size).item() < 0.2, "a tenth of the learning rate"
    scaler = torch.amp.GradScaler(world.device_type, init_scale=4.0)
    scaler.scale(torch.ones((), device=world.device))
    gradients(params, 1)
    for p in params:
        p.grad.mul_(4.0)
    params[0].grad[0, 0] = float("inf")
    before = [p.detach().clone() for p in params]
    scaler.step(optimizer)
    scaler.update()
    for p, b in zip(params, before, strict=True):
        assert torch.equal(p.detach(), b), "a step with infinite gradients is left out"
