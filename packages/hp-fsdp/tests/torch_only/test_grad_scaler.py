"""torch.amp.GradScaler over sharded parameters: one rank's infinity skips the step of all, and nothing else changes."""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from torch_models import CLOSE, TORCH, batch, loss_of, make, make_mesh, meshes, parameters, shard


class Watched(torch.nn.Module):
    """The model, and a parameter whose gradient is what the caller says."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.body = make(world)
        self.blocks = self.body.blocks
        self.watched = torch.nn.Parameter(torch.ones(7, dtype=torch.float64, device=world.device))

    def forward(self, ids: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return loss_of(self.body, ids) + (self.watched * gradient).sum()


# The last number of the watched parameter's gradient on the last rank alone: after the reduction only the rank that holds
# the last row has it.
COURSE = (1.0, math.inf, 2.0, math.nan, -1.0, 0.5, -math.inf, 3.0)


def gradients_of_step(world: World, last: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of what the ranks say, and what this rank says."""
    mine = torch.linspace(-1, 1, 7, dtype=torch.float64, device=world.device)
    bad = mine.clone()
    bad[-1] = last
    mean = (mine * (world.size - 1) + bad) / world.size
    return mean, bad if world.rank == world.size - 1 else mine


def make_optimizer(kind: str, params: Any) -> torch.optim.Optimizer:
    if kind == "SGD":
        return torch.optim.SGD(params, 0.1, momentum=0.9, foreach=False)
    return torch.optim.AdamW(params, 1e-2, fused=kind == "fused AdamW", foreach=None)


@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@distributed(world_size=(1, 2, 3, 4), backends=TORCH)
def test_scale_skipped_steps_and_parameters_are_those_of_one_process(world: World, clip: bool) -> None:
    for mesh, kind in itertools.product(meshes(world), ("AdamW", "fused AdamW", "SGD")):
        models = (Watched(world), shard(Watched(world), mesh))
        optimizers = [make_optimizer(kind, model.parameters()) for model in models]
        scalers = [
            torch.amp.GradScaler(world.device_type, init_scale=256.0, growth_interval=2) for _ in models
        ]
        skipped: list[list[bool]] = [[], []]
        for step, last in enumerate(COURSE):
            samples, said = batch(world, step), gradients_of_step(world, last)
            for i, (model, optimizer, scaler) in enumerate(zip(models, optimizers, scalers, strict=True)):
                before = parameters(model)["watched"].clone()
                scaler.scale(model(samples[i], said[i])).backward()
                if clip:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                skipped[i].append(bool((parameters(model)["watched"] == before).all()))
            assert scalers[0].get_scale() == scalers[1].get_scale()
            assert_parity(parameters(models[1]), parameters(models[0]), **CLOSE, name=f"after step {step}")
        assert skipped[0] == skipped[1] == [not math.isfinite(last) for last in COURSE]


@distributed(world_size=(1, 2, 4), backends=TORCH)
def test_unscaling_costs_one_reduction_of_one_number_per_mesh_dim(world: World) -> None:
    for mesh in meshes(world):
        model = shard(make(world), mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler(world.device_type)
        scaler.scale(loss_of(model, batch(world, 0)[1])).backward()
        with count_collectives() as counted:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        number = sum(size > 1 for size in mesh.shape)
        counted.assert_counts(all_reduce=number)
        assert counted.nbytes() == 4 * number


@distributed(world_size=(2, 3), backends=TORCH)
def test_an_infinity_in_an_ignored_parameter_of_one_rank_skips_the_step_of_all(world: World) -> None:
    mesh = make_mesh(world)
    model = Watched(world)
    fully_shard(model, mesh, ignored_params=[model.watched])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(world.device_type, init_scale=4.0)
    before = {name: value.clone() for name, value in parameters(model).items()}
    _, said = gradients_of_step(world, math.inf)
    scaler.scale(model(batch(world, 0)[1], said)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert bool(torch.isfinite(model.watched.grad).all()) == (world.rank != world.size - 1)
    assert scaler.get_scale() == 2.0
    assert_parity(parameters(model), before, exact=True)


@distributed(world_size=2, backends=TORCH)
def test_a_half_precision_model_skips_its_overflows_and_trains_as_one_process_does(world: World) -> None:
    """The one process computes each rank's samples in float16 from float32 parameters, and adds gradients in float32."""
    reference, model, mesh = make(world).float(), make(world).float(), make_mesh(world)
    policy = MixedPrecisionPolicy(param_dtype="float16", reduce_dtype="float32")
    for block in model.blocks:
        fully_shard(block, mesh, mp_policy=policy)
    fully_shard(model, mesh, mp_policy=replace(policy, output_dtype="float32"))
    ours, theirs = (torch.optim.SGD(each.parameters(), 0.1) for each in (model, reference))
    # The largest gradients of logits are near 0.1, and float16 ends at 65504: the first scales overflow.
    mine, his = (
        torch.amp.GradScaler(world.device_type, init_scale=2.0**22, growth_interval=4) for _ in range(2)
    )
    scales = [mine.get_scale()]
    for step in range(12):
        everything, samples = batch(world, step)
        mine.scale(loss_of(model, samples)).backward()
        for part in everything.chunk(world.size):
            half = make(world).half()
            half.load_state_dict(reference.state_dict())
            logits = half(part).float().flatten(0, 1)
            his.scale(torch.nn.functional.cross_entropy(logits, part.roll(1, 1).flatten())).backward()
            for parameter, computed in zip(reference.parameters(), half.parameters(), strict=True):
                if computed.grad is not None:
                    share = computed.grad.float() / world.size
                    parameter.grad = share if parameter.grad is None else parameter.grad + share
        for scaler, optimizer in ((mine, ours), (his, theirs)):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(mine.get_scale())
        assert scales[-1] == his.get_scale(), f"step {step}"
        # Values near 1 in float32, a dozen steps of 0.1.
        assert_parity(
            parameters(model), parameters(reference), rtol=0.0, atol=1e-5, name=f"after step {step}"
        )
    assert scales[1] < scales[0], "the first step overflows"
    assert any(later >= sooner for sooner, later in itertools.pairwise(scales)), "some steps go through"
