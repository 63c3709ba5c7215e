"""Models of torch's own layers whose parameters are DTensors, without a mesh: recomputed, clipped, stepped by torch's optimizers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_fsdp import fully_shard
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from torch_models import CLOSE, TORCH, Model, batch, gradients, loss_of, make, make_mesh, parameters


class Recomputing(Model):
    """Blocks are recomputed in backward."""

    reentrant: bool | None = None

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x) * self.scale


def distribute(model: Model, world: World) -> dict[int, Any]:
    """All parameters whole on all ranks; ties stay."""
    mesh, made = make_mesh(world), {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                dtensor = distribute_tensor(parameter.detach(), mesh, [Replicate()])
                made[id(parameter)] = parameter, torch.nn.Parameter(dtensor)
            module.register_parameter(name, made[id(parameter)][1])
    return made


@pytest.mark.parametrize("reentrant", [None, False, True])
@distributed(world_size=(2, 3), backends=TORCH, timeout=180)
def test_training_equals_one_process_and_each_unit_is_reduced_once(
    world: World, reentrant: bool | None
) -> None:
    reference, model = make(world), make(world)
    model.__class__, model.reentrant = Recomputing, reentrant
    distribute(model, world)
    # Made before: the parameters stay the objects that they are.
    optimizers = [torch.optim.AdamW(each.parameters(), 0.01) for each in (reference, model)]
    for module in (*model.blocks, model):
        fully_shard(module)
    for step in range(3):
        ids, _ = batch(world, step)
        loss_of(reference, ids).backward()
        given = distribute_tensor(ids, make_mesh(world), [Shard(0)])
        loss = torch.nn.functional.cross_entropy(model(given).flatten(0, 1), given.roll(1, 1).flatten())
        with count_collectives() as counted:
            loss.backward()
        # Each block, and the root; nothing is added up by operations, also not in recomputations.
        assert counted.counts["all_reduce"] == 3
        assert_parity(gradients(model), gradients(reference), **CLOSE, name=f"step {step}")
        norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (reference, model)]
        assert_parity(norms[1], norms[0], **CLOSE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # AdamW divides by square roots of squares of small gradients, so roundings grow to some 1e-10.
    assert_parity(parameters(model), parameters(reference), rtol=0.0, atol=1e-8)
