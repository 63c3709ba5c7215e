"""Optimizers that were made before the model was cut: a step says so on every rank, and nothing has changed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor import distribute_module, parallelize_module, shard_module
from hp_dtensor.sharding_plan import ShardingPlan
from hp_fsdp import fully_shard
from hp_optim import AdamW, ChainedOptimizer, Muon, get_hyper_optimizer
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from optim_twins import ROWS, make_model

WEIGHT = "first.layers.0.weight"


def all_optimizers(world: World, model: Any) -> dict[str, Any]:
    named = list(world.platform.named_parameters(model))
    return {
        "AdamW": AdamW(named, lr=0.1),
        "Muon": Muon([(name, p) for name, p in named if len(p.shape) == 2], lr=0.1),
        "ChainedOptimizer": get_hyper_optimizer(model, muon_kwargs={"lr": 0.1}, adamw_kwargs={"lr": 0.1}),
    }


class Replicated:
    """A style for any module."""

    def apply(self, module: Any, device_mesh: Any) -> Any:
        return distribute_module(module, device_mesh)


def cut(model: Any, mesh: Any, by: str) -> None:
    if by == "fully_shard":
        fully_shard(model.first, mesh)
        fully_shard(model, mesh)
    elif by == "parallelize_module":
        parallelize_module(model, mesh, {"first.layers.0": Replicated()})
    elif by == "distribute_module":
        distribute_module(model.first.layers[0], mesh)
    else:
        shard_module(model, mesh, ShardingPlan(plan={WEIGHT: ("dp", "None")}))


@pytest.mark.parametrize("by", ["fully_shard", "parallelize_module", "distribute_module", "shard_module"])
@distributed(world_size=2, timeout=120)
def test_a_step_is_refused_on_every_rank_with_the_name_of_a_parameter(world: World, by: str) -> None:
    platform = world.platform
    model = make_model(world, "float32")
    optimizers = all_optimizers(world, model)
    cut(model, init_device_mesh(world.device_type, (2,), mesh_dim_names=("dp",)), by)
    held = [p for group in optimizers["AdamW"].param_groups for p in group["params"]]
    before = [np.array(platform.to_numpy(p)) for p in held]
    for name, optimizer in optimizers.items():
        with pytest.raises(
            ValueError,
            match=rf"{name}\.step: parameter '(first|second|scale)[\w.]*', of shape \(.*\), is a parameter from before {by}, which the model "
            rf"does not use any more, so a step would train nothing: make the optimizer after {by}",
        ):
            optimizer.step()
        assert all(group.get("step", 0) == 0 for group in optimizer.param_groups)
    for p, value in zip(held, before, strict=True):
        np.testing.assert_array_equal(platform.to_numpy(p), value)


@distributed(world_size=2, timeout=120)
def test_optimizers_that_are_made_afterwards_step(world: World) -> None:
    platform = world.platform
    model = make_model(world, "float32")
    cut(model, init_device_mesh(world.device_type, (2,), mesh_dim_names=("dp",)), "fully_shard")
    x = platform.tensor(np.ones((ROWS, 4)), "float32", world.device)
    for optimizer in all_optimizers(world, model).values():
        before = np.array(platform.to_numpy(model.first.layers[0].weight.full_tensor()))
        platform.backward([platform.sum(model(x))])
        optimizer.step()
        optimizer.zero_grad()
        assert not np.array_equal(platform.to_numpy(model.first.layers[0].weight.full_tensor()), before)


@distributed(world_size=2, timeout=120, backends=("torch", "cuda"))
def test_a_chain_looks_at_the_optimizers_of_torch(world: World) -> None:
    import torch

    model = make_model(world, "float32")
    chain = ChainedOptimizer(model, {"theirs": torch.optim.AdamW(model.parameters(), lr=0.1)})
    cut(model, init_device_mesh(world.device_type, (2,)), "fully_shard")
    with pytest.raises(
        ValueError, match=r"ChainedOptimizer\.step: parameter '[a-z]+[\w.]*', of shape .*after fully_shard"
    ):
        chain.step()
