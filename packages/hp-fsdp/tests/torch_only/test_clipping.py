"""torch.nn.utils.clip_grad_norm_ and get_total_norm on sharded parameters: the norm of the whole gradients."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_fsdp import fully_shard
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from torch_models import CLOSE, TORCH, batch, gradients, loss_of, make, make_mesh, meshes, parameters, shard

NORMS = (1.0, 2.0, math.inf, 3.0)


@pytest.mark.parametrize("foreach", [None, True, False], ids=["as it is", "lists", "one by one"])
@distributed(world_size=(1, 2, 3, 4), backends=TORCH)
def test_norm_and_clipped_gradients_and_the_step_are_those_of_one_process(
    world: World, foreach: bool | None
) -> None:
    for mesh in meshes(world):
        reference, model = make(world), shard(make(world), mesh)
        models = (reference, model)
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in models]
        for step, kind in enumerate(NORMS):
            for each, samples in zip(models, batch(world, step), strict=True):
                loss_of(each, samples).backward()
            norms = [
                torch.nn.utils.get_total_norm(
                    [p.grad for p in each.parameters() if p.grad is not None], kind, foreach=foreach
                )
                for each in models
            ]
            clipped = [
                torch.nn.utils.clip_grad_norm_(
                    each.parameters(), 0.05, kind, error_if_nonfinite=True, foreach=foreach
                )
                for each in models
            ]
            assert_parity(norms[1], norms[0], **CLOSE, name=f"total norm {kind}")
            assert_parity(clipped[1], norms[0], **CLOSE, name=f"norm {kind}")
            assert norms[0].item() > 0.05, "something is clipped"
            assert_parity(gradients(model), gradients(reference), **CLOSE, name=f"clipped by norm {kind}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_parity(parameters(model), parameters(reference), **CLOSE, name=f"after step {step}")


@distributed(world_size=(2, 4), backends=TORCH)
def test_clipping_a_list_costs_one_reduction_along_the_dim_that_shards(world: World) -> None:
    for mesh in meshes(world):
        model = shard(make(world), mesh)
        loss_of(model, batch(world, 0)[1]).backward()
        sharded = sum(p.grad is not None and p.ndim > 0 for p in model.parameters())
        with count_collectives() as counted:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            value = norm.item()
        assert value > 0.05
        counted.assert_counts(all_reduce=1)
        assert counted.nbytes() == 8 * sharded, "a number per parameter"


@pytest.mark.parametrize("foreach", [True, False])
@distributed(world_size=(2, 3), backends=TORCH)
def test_a_norm_that_is_not_finite_on_one_rank_is_refused_by_all(world: World, foreach: bool) -> None:
    for bad in (math.inf, math.nan):
        model = shard(make(world), make_mesh(world))
        loss_of(model, batch(world, 0)[1]).backward()
        if world.rank == 0:
            model.embed.weight.grad.to_local()[0, 0] = bad
        for kind in NORMS:
            with pytest.raises(RuntimeError, match="non-finite"):
                torch.nn.utils.clip_grad_norm_(
                    model.parameters(), 0.05, kind, error_if_nonfinite=True, foreach=foreach
                )
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=foreach)
        assert not math.isfinite(norm.item())


@pytest.mark.parametrize("foreach", [None, False], ids=["lists", "one by one"])
@distributed(world_size=4, backends=TORCH)
def test_parameters_on_several_meshes_and_plain_ones_count_once_each(
    world: World, foreach: bool | None
) -> None:
    """The first block is sharded over (2, 2), the second over all four, and one parameter is left alone."""
    reference, model = make(world), make(world)
    fully_shard(model.blocks[0], make_mesh(world, 2))
    fully_shard(model, make_mesh(world), ignored_params=[model.scale])
    everything, _ = batch(world, 0)
    for kind in NORMS:
        for each in (
            reference,
            model,
        ):  # the same samples on all ranks: nobody reduces the plain parameter's gradient
            each.zero_grad()
            loss_of(each, everything).backward()
        found, wanted = (
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.05, kind, foreach=foreach)
            for each in (model, reference)
        )
        assert_parity(found, wanted, **CLOSE, name=f"norm {kind}")
        assert_parity(gradients(model), gradients(reference), **CLOSE, name=f"clipped by norm {kind}")


@distributed(world_size=2, backends=TORCH)
def test_clipping_by_value_and_by_a_norm_known_already(world: World) -> None:
    reference, model = make(world), shard(make(world), make_mesh(world))

    def both(clip: Any) -> None:
        for each, samples in zip((reference, model), batch(world, 0), strict=True):
            each.zero_grad()
            loss_of(each, samples).backward()
            clip(list(each.parameters()))
        assert_parity(gradients(model), gradients(reference), **CLOSE)

    both(lambda params: torch.nn.utils.clip_grad_value_(params, 0.01))
    both(
        lambda params: torch.nn.utils.clip_grads_with_norm_(
            params, 0.05, torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        )
    )
