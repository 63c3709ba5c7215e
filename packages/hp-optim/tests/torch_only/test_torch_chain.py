"""A chain among torch's own parts: schedulers, GradScaler, hooks, torch.distributed.checkpoint, and torch's optimizers in it."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.lr_scheduler import LambdaLR

from hp_optim import ChainedOptimizer, get_hyper_optimizer
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parents[1] / "chain"))
from chain_models import give_gradients, make_model, parameters, shard, snapshot

TORCH = ["torch", "cuda"]
KINDS = pytest.mark.parametrize("kind", ["torch", "ours"])


def made(world: World, kind: str = "torch", *, steps: int = 0, flatten: bool = False) -> ChainedOptimizer:
    """torch's own SGD and AdamW over a sharded model; or, of kind "ours", Muon and AdamW."""
    model = shard(world, make_model(world))
    if kind == "ours":
        chain = get_hyper_optimizer(
            model, muon_kwargs={"lr": 0.125, "ns_dtype": "float64"}, adamw_kwargs={"lr": 0.25}
        )
        chain.flatten = flatten
        for step in range(steps):
            train(world, chain, step)
        return chain
    named = parameters(world, model).values()
    optimizers = {
        "sgd": torch.optim.SGD([p for p in named if p.ndim < 2], 0.25, momentum=0.5, foreach=False),
        "adamw": torch.optim.AdamW([p for p in named if p.ndim > 1], 0.125, foreach=False),
    }
    chain = ChainedOptimizer(model, optimizers, flatten)
    for step in range(steps):
        train(world, chain, step)
    return chain


def train(world: World, chain: ChainedOptimizer, step: int) -> None:
    give_gradients(world, chain.model, step)
    chain.step()
    chain.zero_grad()


def wholes(world: World, chain: ChainedOptimizer) -> dict[str, Any]:
    return {name: p.full_tensor().detach() for name, p in parameters(world, chain.model).items()}


@distributed(world_size=1, backends=TORCH)
def test_a_scheduler_drives_all_groups_of_a_chain(world: World) -> None:
    ours = made(world, "ours")
    LambdaLR(ours, lambda _: 0.5)
    assert [group["lr"] for group in ours.param_groups] == [0.125, 0.0625]
    chain = made(world)
    assert isinstance(chain, torch.optim.Optimizer)
    scheduler = LambdaLR(chain, lambda step: 1 / (1 + step))
    for step in range(3):
        train(world, chain, step)
        scheduler.step()
    assert scheduler.get_last_lr() == [0.25 / 4, 0.125 / 4]
    assert [group["lr"] for optimizer in chain for group in optimizer.param_groups] == [0.25 / 4, 0.125 / 4]
    per_group = LambdaLR(chain, [lambda _: 1.0, lambda _: 0.5])
    assert per_group.get_last_lr() == [0.25, 0.0625]


@KINDS
@distributed(world_size=(1, 2), backends=TORCH)
def test_grad_scaler_unscales_and_skips_a_whole_chain(world: World, kind: str) -> None:
    plain, scaled = made(world, kind), made(world, kind)
    scaler = torch.amp.GradScaler(world.device_type, init_scale=8.0, growth_interval=100)
    scaler.scale(torch.zeros((), device=world.device))  # a loss, from which it learns the device
    for step, bad in enumerate((False, True, False)):
        give_gradients(world, scaled.model, step)
        for parameter in parameters(world, scaled.model).values():
            parameter.grad = parameter.grad * scaler.get_scale()
        if bad:
            rows = parameters(world, scaled.model)["layers.1.up.weight"].grad.to_local()
            if world.rank == world.size - 1:
                rows[-1, -1] = math.inf
        else:
            train(world, plain, step)
        scaler.unscale_(scaled)
        scaler.step(scaled)
        scaler.update()
        scaled.zero_grad()
        assert_parity(wholes(world, scaled), wholes(world, plain), exact=True, name=f"after step {step}")
    assert scaler.get_scale() == 4.0


@distributed(world_size=1, backends=TORCH)
def test_hooks_run_around_the_step_and_those_of_state_dicts_are_refused(world: World) -> None:
    chain, seen = made(world), []
    chain.register_step_pre_hook(lambda *_: seen.append("before"))
    chain.register_step_post_hook(lambda *_: seen.append("after"))
    next(iter(chain)).register_step_post_hook(lambda *_: seen.append("inner"))
    train(world, chain, 0)
    assert seen == ["before", "inner", "after"]
    for register in (
        chain.register_state_dict_pre_hook,
        chain.register_state_dict_post_hook,
        chain.register_load_state_dict_pre_hook,
        chain.register_load_state_dict_post_hook,
    ):
        with pytest.raises(
            ValueError, match="makes its state dict by names, and calls no hooks for it: change what"
        ):
            register(lambda *_: None)


@KINDS
@pytest.mark.parametrize("flatten", [False, True])
@distributed(world_size=(2, 3), backends=TORCH)
def test_torch_checkpoints_keep_a_chain_and_load_into_one_that_has_stepped(
    world: World, kind: str, flatten: bool, tmp_path: Path
) -> None:
    chain, other = (made(world, kind, steps=steps, flatten=flatten) for steps in (3, 1))
    before = snapshot(chain)
    dcp.save({"optimizer": chain}, checkpoint_id=tmp_path)
    assert snapshot(chain) == before
    chain.param_groups[0]["lr"] = 1.0  # since
    dcp.load({"optimizer": other}, checkpoint_id=tmp_path)
    assert other.param_groups[0]["lr"] == 0.25
    chain.param_groups[0]["lr"] = 0.25
    for name, parameter in parameters(world, chain.model).items():
        mine = other.state[parameters(world, other.model)[name]]
        assert_parity(mine, dict(chain.state[parameter]), exact=True, name=name)


@KINDS
@distributed(world_size=(1, 2), backends=TORCH)
def test_torch_state_dict_functions_take_the_optimizers_of_a_chain(world: World, kind: str) -> None:
    chain, other = made(world, kind, steps=2), made(world, kind)
    state = get_optimizer_state_dict(chain.model, list(chain))
    assert set(state["state"]) == set(parameters(world, chain.model))
    set_optimizer_state_dict(other.model, list(other), state)
    for name, parameter in parameters(world, chain.model).items():
        mine = other.state[parameters(world, other.model)[name]]
        assert_parity(dict(mine), dict(chain.state[parameter]), exact=True, name=name)


@distributed(world_size=1, backends=TORCH)
def test_states_of_a_chain_of_torch_optimizers_go_on_bit_by_bit(world: World) -> None:
    chain, other = made(world, steps=2), made(world)
    other.load_state_dict(copy.deepcopy(chain.state_dict()))
    for name, value in parameters(world, other.model).items():
        value.to_local().detach().copy_(parameters(world, chain.model)[name].to_local())
    for step in (2, 3):
        train(world, chain, step)
        train(world, other, step)
    assert_parity(wholes(world, other), wholes(world, chain), exact=True)
