"""torch.inference_mode before, between and after training steps; what is made in it serves training, too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_dtensor import random
from hp_fsdp import fully_shard, register_forward_method
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parents[1]))
from fsdp_models import make_mesh

TORCH = ("torch", "cuda")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.block = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.ones(()))

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.scale, 1.5)

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.block(self.embed(ids))) * self.scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(ids))


class Doubled:
    """An extension that makes a new tensor."""

    def fsdp_pre_all_gather(self, shard: torch.Tensor, mesh: Any) -> Any:
        return (shard,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: None, dtype: Any, *, out: Any = None) -> Any:
        if out is not None:
            out.copy_(outputs[0])
            return None
        whole = outputs[0] * 1
        return whole, (whole,)


def reset(model: torch.nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


@pytest.mark.parametrize("way", ["as it is", "from meta", "replicated", "extension", "narrow", "kept"])
@distributed(world_size=(1, 2), backends=TORCH)
def test_evaluation_in_inference_mode_and_training_take_turns(world: World, way: str) -> None:
    reference = Model().double().to(world.device)
    random.manual_seed(1)
    with random.global_draws():
        reset(reference)
    model = Model().double()
    if way == "from meta":
        model = model.to("meta")
        model.head.weight = model.embed.weight
    else:
        model.load_state_dict(reference.state_dict())
    mesh, options = make_mesh(world), {}
    if way == "replicated":
        options["replicate_params"] = [model.block.weight, model.embed.weight]
    if way == "extension":
        model.block.weight._hp_fsdp_extension = Doubled()  # type: ignore[assignment]
    if way == "kept":
        options["reshard_after_forward"] = False
    fully_shard(model.block, mesh, **{k: v for k, v in options.items() if k != "replicate_params"})
    fully_shard(model, mesh, **options)
    register_forward_method(model, "encode")
    if way == "narrow":
        model.set_reshard_after_backward(False)
    if way == "from meta":
        model.to_empty(device=world.device)
        random.manual_seed(1)
        reset(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.2) for each in (model, reference)]
    batches = [torch.arange(3 * r, 3 * r + 4, device=world.device) % 11 for r in range(world.size)]
    mine = batches[world.rank]
    for _ in range(3):
        with torch.inference_mode():
            torch.testing.assert_close(model(mine), reference(mine), rtol=0.0, atol=1e-13)
            torch.testing.assert_close(model.encode(mine), reference.encode(mine), rtol=0.0, atol=1e-13)
        model(mine).square().mean().backward()
        torch.stack([reference(ids).square().mean() for ids in batches]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(
                value.full_tensor(), reference.state_dict()[name], rtol=0.0, atol=1e-13
            )
        assert not any(p.is_inference() or p.to_local().is_inference() for p in model.parameters())
