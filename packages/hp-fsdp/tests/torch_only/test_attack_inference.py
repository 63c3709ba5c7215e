"""What a first forward in inference mode makes serves training: units that are made of the root's large layers, too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from hp_fsdp import fully_shard, parts
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from torch_models import CLOSE, TORCH, batch, gradients, loss_of, make_mesh


def make(world: World) -> torch.nn.Module:
    torch.manual_seed(3)
    layers = [torch.nn.Embedding(11, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 11)]
    return torch.nn.Sequential(*layers).double().to(world.device)


@distributed(world_size=2, backends=TORCH)
def test_parts_of_the_root_that_are_made_in_inference_mode_train(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MIN_NBYTES", 1)
        reference, model, mesh = make(world), make(world), make_mesh(world)
        fully_shard(model[1], mesh)
        fully_shard(model, mesh)
        everything, mine = batch(world, 0)
        with torch.inference_mode():
            assert_parity(model(mine), reference(mine), **CLOSE)
        for _ in range(2):
            loss_of(model, mine).backward()
            loss_of(reference, everything).backward()
            assert_parity(gradients(model), gradients(reference), **CLOSE)
