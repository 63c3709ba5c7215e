"""torch's own optimizers on sharded parameters: every step as in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from torch_models import CLOSE, TORCH, batch, loss_of, make, make_mesh, meshes, parameters, shard

NUM_STEPS = 5
optim = torch.optim
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, lists": lambda ps: optim.AdamW(ps, 1e-2, weight_decay=0.1, foreach=True),
    "AdamW, fused": lambda ps: optim.AdamW(ps, 1e-2, weight_decay=0.1, fused=True),
    "AdamW, one by one": lambda ps: optim.AdamW(ps, 1e-2, weight_decay=0.1, amsgrad=True, foreach=False),
    "Adam": lambda ps: optim.Adam(ps, 1e-2),
    "SGD": lambda ps: optim.SGD(ps, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, fused": lambda ps: optim.SGD(ps, 0.1, momentum=0.9, nesterov=True, fused=True),
    "SGD, one by one": lambda ps: optim.SGD(ps, 0.1, momentum=0.9, nesterov=True, foreach=False),
    "Adagrad": lambda ps: optim.Adagrad(ps, 1e-2),
    "Adagrad, fused": lambda ps: optim.Adagrad(ps, 1e-2, fused=True),
    "RMSprop": lambda ps: optim.RMSprop(ps, 1e-3, momentum=0.9, centered=True),
}
"""All of these work element by element: no communication."""


@distributed(world_size=(1, 2, 3, 4), backends=TORCH)
def test_five_steps_of_elementwise_optimizers_equal_one_process_and_communicate_nothing(world: World) -> None:
    for mesh in meshes(world):
        for name, create in OPTIMIZERS.items():
            if name == "Adagrad, fused" and world.device_type != "cpu":
                continue  # torch has no such kernel
            models = (make(world), shard(make(world), mesh))
            optimizers = [create(model.parameters()) for model in models]
            for step in range(NUM_STEPS):
                for model, optimizer, samples in zip(models, optimizers, batch(world, step), strict=True):
                    loss_of(model, samples).backward()
                    with count_collectives() as counted:
                        optimizer.step()
                    counted.assert_counts()
                    optimizer.zero_grad()
            assert_parity(parameters(models[1]), parameters(models[0]), **CLOSE, name=name)


@pytest.mark.parametrize("name", ["AdamW, lists", "AdamW, fused", "SGD, fused"])
@distributed(world_size=2, backends=TORCH)
def test_what_an_optimizer_writes_is_gathered_where_whole_parameters_were_kept(
    world: World, name: str
) -> None:
    models = (make(world), shard(make(world), make_mesh(world)))
    models[1].set_reshard_after_backward(False)
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in models]
    for step in range(NUM_STEPS):
        for model, optimizer, samples in zip(models, optimizers, batch(world, step), strict=True):
            loss_of(model, samples).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_parity(parameters(models[1]), parameters(models[0]), **CLOSE)


@pytest.mark.parametrize("foreach", [True, False], ids=["lists", "one by one"])
@distributed(world_size=(1, 2, 3, 4), backends=TORCH)
def test_adafactor_sees_whole_rows_and_columns(world: World, foreach: bool) -> None:
    for mesh in meshes(world):
        models = (make(world), shard(make(world), mesh))
        optimizers = [optim.Adafactor(model.parameters(), 1e-2, foreach=foreach) for model in models]
        for step in range(NUM_STEPS):
            for model, optimizer, samples in zip(models, optimizers, batch(world, step), strict=True):
                loss_of(model, samples).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_parity(parameters(models[1]), parameters(models[0]), **CLOSE)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@distributed(world_size=(2, 3), backends=TORCH)
def test_lbfgs_asks_for_losses_and_takes_directions_of_the_whole(world: World, search: str | None) -> None:
    """Its closure gives the mean loss of all ranks, so that all ranks search alike."""
    models = (make(world), shard(make(world), make_mesh(world)))
    optimizers = [
        # The unused parameter has no gradient, which LBFGS takes for zeros in both.
        optim.LBFGS(model.parameters(), 0.1, max_iter=3, history_size=2, line_search_fn=search)
        for model in models
    ]
    samples = batch(world, 0)
    losses: list[list[float]] = [[], []]
    for _ in range(2):
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):

            def closure(model: Any = model, optimizer: Any = optimizer, i: int = i) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, samples[i])
                loss.backward()
                value = loss.detach()
                if i:
                    torch.distributed.all_reduce(value)
                    value = value / world.size
                losses[i].append(value.item())
                return value

            optimizer.step(closure)
    assert_parity(losses[1], losses[0], **CLOSE, name="losses of all calls")
    # Directions are quotients of differences of gradients: some digits are lost in them.
    assert_parity(parameters(models[1]), parameters(models[0]), rtol=0.0, atol=1e-11)


@distributed(world_size=(2, 3), backends=TORCH)
def test_states_lie_as_parameters_do(world: World) -> None:
    model = shard(make(world), make_mesh(world))
    optimizer = optim.AdamW(model.parameters())
    loss_of(model, batch(world, 0)[1]).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        if name == "unused":
            assert not state
            continue
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[key].placements == parameter.placements, name
            assert state[key].to_local().shape == parameter.to_local().shape, name


@distributed(world_size=2, backends=TORCH)
def test_a_schedule_and_groups_of_parameters_work_as_ever(world: World) -> None:
    models = (make(world), shard(make(world), make_mesh(world)))
    optimizers, schedules = [], []
    for model in models:
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        optimizers.append(optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], 1e-2))
        schedules.append(optim.lr_scheduler.OneCycleLR(optimizers[-1], 0.1, total_steps=NUM_STEPS))
    for step in range(NUM_STEPS):
        for i, samples in enumerate(batch(world, step)):
            loss_of(models[i], samples).backward()
            optimizers[i].step()
            schedules[i].step()
            optimizers[i].zero_grad()
    assert_parity(parameters(models[1]), parameters(models[0]), **CLOSE)
