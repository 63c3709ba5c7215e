"""An optimizer with one number of state per number, and models that it has trained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hp_dtensor import DTensor
from hp_fsdp import (
    StateDictOptions,
)
from hp_platform import get_platform
from hp_platform.testing import World

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import PROGRAMS, Maker, loss_of, make_mesh

FULL = StateDictOptions(full_state_dict=True)
FROM_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Momentum:
    """``v = mu * v + grad; p = p - lr * v``, and a count of steps. The user's own: it works on pieces."""

    def __init__(self, *groups: list[Any], lr: float = 0.1) -> None:
        self.param_groups = [{"params": list(group), "lr": lr, "mu": 0.5} for group in groups]
        self.state: dict[Any, dict[str, Any]] = {}

    def step(self) -> None:
        platform = get_platform()
        for group in self.param_groups:
            for parameter in group["params"]:
                self._step(platform, parameter, group)

    def _step(self, platform: Any, parameter: Any, group: dict[str, Any]) -> None:
        shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        gradient = platform.get_grad(shard)
        if gradient is None:
            return
        entry = self.state.get(parameter)
        if entry is None:
            zeros = platform.zeros_like(platform.detach(shard))
            if isinstance(parameter, DTensor):
                zeros = DTensor.from_local(
                    zeros, parameter.device_mesh, parameter.placements, shape=tuple(parameter.shape)
                )
            steps = platform.zeros((), "float32", platform.device_of(shard))
            entry = self.state[parameter] = {"velocity": zeros, "step": steps, "calls": 0}
        velocity = entry["velocity"]
        velocity = velocity.to_local() if isinstance(velocity, DTensor) else velocity
        platform.mul_(velocity, group["mu"])
        platform.add_(velocity, gradient)
        platform.add_(shard, velocity, alpha=-group["lr"])
        platform.add_(entry["step"], 1)
        entry["calls"] = entry["calls"] + 1
        platform.set_grad(shard, None)


def params(world: World, model: Any) -> list[Any]:
    return [p for _, p in world.platform.named_parameters(model)]


def trained(world: World, name: str, num_steps: int = 2, mesh: Any = None) -> tuple[Any, Momentum]:
    program = PROGRAMS[name]
    model = program.shard(program.build(Maker(world)), mesh or make_mesh(world))
    optimizer = Momentum(params(world, model))
    for step in range(num_steps):
        train(world, name, model, optimizer, step)
    return model, optimizer


def train(world: World, name: str, model: Any, optimizer: Momentum, step: int) -> None:
    inputs = PROGRAMS[name].inputs(Maker(world), world.rank, step)
    world.platform.backward([loss_of(world.platform, model(inputs, rank=world.rank))])
    optimizer.step()
