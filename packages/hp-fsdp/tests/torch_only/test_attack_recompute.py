"""Reentrant checkpoints: units inside of them are whole one after the other, not all at once, and reduce during backward."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hp_fsdp import fully_shard
from hp_fsdp.states import ShardState
from hp_fsdp.unit import units_in
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from torch_models import CLOSE, TORCH, gradients, make_mesh


class Model(torch.nn.Module):
    """Five layers, each within a checkpoint; the second one runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for at in (0, 1, 1, 2, 3, 4):
            x = checkpoint(self.layers[at], x, use_reentrant=True).sin()
        return self.last(x)


def make(world: World) -> Model:
    torch.manual_seed(5)
    return Model().double().to(world.device)


@distributed(world_size=2, backends=TORCH)
def test_units_in_reentrant_checkpoints_are_whole_one_at_a_time(world: World) -> None:
    reference, model, mesh = make(world), make(world), make_mesh(world)
    for layer in model.layers:
        fully_shard(layer, mesh)
    fully_shard(model, mesh)
    units = list(units_in(world.platform, model))
    most: list[int] = []

    def look(*_: Any) -> None:
        most.append(sum(unit.state is not ShardState.SHARDED for unit in units))

    model.layers[0].register_forward_hook(look)
    for step in range(2):
        inputs = [
            torch.full((2, 4), 0.3 * rank + step, dtype=torch.float64, device=world.device) for rank in (0, 1)
        ]
        sum(reference(x).square().mean() / 2 for x in inputs).backward()
        with count_collectives() as counted:
            model(inputs[world.rank]).square().mean().backward()
        # The root once, the layers for forward and for backward, the second one for each of its calls.
        assert counted.counts["reduce_scatter"] == 6
        assert_parity(gradients(model), gradients(reference), **CLOSE)
    assert max(most) <= 3, "the root, the unit that runs and the one that is gathered ahead"
