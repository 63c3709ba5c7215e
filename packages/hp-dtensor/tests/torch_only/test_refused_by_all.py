"""What torch refuses for its arguments is refused by all ranks, also by those without elements: none waits for the others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import Placement, Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed

TORCH = ("torch", "cuda")


def _weights(name: str, reduction: str) -> Callable[[Any, Any, Any], Any]:
    if name == "pos_weight":
        return lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, pos_weight=w, reduction=reduction)
    function = {"cross_entropy": F.cross_entropy, "nll_loss": F.nll_loss}[name]
    return lambda x, y, w: function(x, (y[:, 0] > 0.5).long(), w, reduction=reduction)


@pytest.mark.parametrize("name", ["pos_weight", "cross_entropy", "nll_loss"])
@distributed(4, backends=TORCH, timeout=30)
def test_a_weight_that_requires_a_gradient_is_refused_by_ranks_without_elements_too(
    name: str, world: World
) -> None:
    mesh = init_device_mesh(world.device_type, (4,))

    def cut(x: torch.Tensor, placement: Placement) -> Any:
        return distribute_tensor(x, mesh, [placement])

    scores, labels = torch.full((2, 3), 0.25), torch.eye(2, 3)
    scores, labels = scores.to(world.device), labels.to(world.device)
    for reduction in ("none", "sum", "mean"):
        call = _weights(name, reduction)
        weight = torch.tensor([1.0, 2.0, 3.0], device=world.device)
        found = call(cut(scores, Shard(0)), cut(labels, Shard(0)), cut(weight, Replicate()))
        expected = call(scores, labels, weight)
        assert torch.allclose(found.full_tensor(), expected)
        weight.requires_grad_()
        with pytest.raises(RuntimeError, match="not differentiable with respect to argument"):
            call(scores, labels, weight)
        with pytest.raises(RuntimeError, match="not differentiable with respect to argument"):
            call(
                cut(scores, Shard(0)),
                cut(labels, Shard(0)),
                cut(weight.detach(), Replicate()).requires_grad_(),
            )


@distributed(4, backends=TORCH, timeout=30)
def test_any_and_all_over_no_dim_are_refused_on_every_rank(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (4,))
    plain = torch.tensor([[True, False], [False, True]], device=world.device)
    for placement in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(plain, mesh, [placement])
        for function in (torch.any, torch.all):
            for keepdim in (False, True):
                assert function(plain, dim=(), keepdim=keepdim).shape == plain.shape
                with pytest.raises(ValueError, match="reduces no dim here"):
                    function(x, dim=(), keepdim=keepdim)
            assert torch.equal(function(x, dim=None).full_tensor(), function(plain))
            assert torch.equal((x != 0).full_tensor(), plain)


@distributed((2, 4), backends="torch", timeout=30)
def test_a_number_that_a_whole_table_lacks_is_refused_by_every_rank_that_has_the_number(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    table = distribute_tensor(torch.ones(5, 2), mesh, [Replicate()])
    for numbers in (torch.tensor([0, 5]), torch.tensor([5, 0])):
        with pytest.raises((IndexError, RuntimeError), match="out of range"):
            F.embedding(distribute_tensor(numbers, mesh, [Replicate()]), table)
    scores = distribute_tensor(torch.ones(world.size, 3), mesh, [Replicate()])
    targets = torch.tensor([*[0] * (world.size - 1), 3])
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(scores, distribute_tensor(targets, mesh, [Replicate()]))
    # The mean counts all targets before any rank looks at its own: only the last rank has the one that is no class.
    cut = [distribute_tensor(x, mesh, [Shard(0)]) for x in (torch.ones(world.size, 3), targets)]
    if world.rank == world.size - 1:
        with pytest.raises(IndexError, match="out of bounds"):
            F.cross_entropy(*cut)
    else:
        assert F.cross_entropy(*cut).to_local().isfinite()
