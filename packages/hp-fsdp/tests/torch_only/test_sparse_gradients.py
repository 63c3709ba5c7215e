"""Sparse gradients of embeddings are refused with the parameter's name; without them the same model trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hp_fsdp import fully_shard
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed


def make(world: World, **options: Any) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4, sparse=True), torch.nn.Linear(4, 3))
    return fully_shard(model.to(world.device), init_device_mesh(world.device_type, (world.size,)), **options)


@pytest.mark.parametrize("options", [{}, {"comm_fusion": False}, {"reshard_after_forward": False}])
@distributed(world_size=(1, 2), backends="torch")
def test_a_sparse_gradient_is_refused_with_the_name_of_its_parameter(
    world: World, options: dict[str, Any]
) -> None:
    model = make(world, **options)
    ids = torch.tensor([1, 3], device=world.device)
    message = (
        r"gradient of parameter '0\.weight', of shape \(5, 4\), is sparse, .*sparse=False, .*ignored_params"
    )
    with pytest.raises(ValueError, match=message):
        model(ids).sum().backward()
    model.zero_grad()
    model[0].sparse = False
    model(ids).sum().backward()
    whole = model[0].weight.grad.full_tensor()
    assert (whole.abs().sum(1) > 0).tolist() == [False, True, False, True, False]


@distributed(world_size=2, backends="torch")
def test_so_it_is_after_micro_batches_that_were_not_synchronised(world: World) -> None:
    model = make(world)
    ids = torch.tensor([1, 3], device=world.device)
    model.set_requires_gradient_sync(False)
    model(ids).sum().backward()
    model.set_requires_gradient_sync(True)
    with pytest.raises(ValueError, match=r"gradient of parameter '0\.weight', of shape \(5, 4\), is sparse"):
        model(ids).sum().backward()
