"""SkipDTensorDispatch around torch's own optimizers, functions written in Python, and foreign autograd Functions."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import DTensor, Shard, SkipDTensorDispatch, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

TORCH = ("torch", "cuda")


class Square(torch.autograd.Function):
    """Not ours."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * g


def _leaf(world: World) -> Any:
    mesh = init_device_mesh(world.device_type, (world.size,))
    whole = torch.arange(10.0, dtype=torch.float64, device=world.device).view(5, 2)
    return whole, distribute_tensor(whole.clone().requires_grad_(), mesh, [Shard(0)])


@pytest.mark.parametrize("foreach", [False, True])
@distributed(world_size=2, backends=TORCH)
def test_an_optimizers_step_on_pieces_is_the_step_of_the_whole(foreach: bool, world: World) -> None:
    whole, x = _leaf(world)
    plain = torch.nn.Parameter(whole.clone())
    for parameter in (plain, x):
        (parameter * parameter).sum().backward()
    with SkipDTensorDispatch(), count_collectives() as counted:
        torch.optim.Adam([x], lr=0.1, foreach=foreach).step()
    torch.optim.Adam([plain], lr=0.1, foreach=foreach).step()
    counted.assert_counts()
    assert_parity(x.detach(), plain.detach(), rtol=0.0, atol=1e-15)  # the same operations on each element


@distributed(world_size=2, backends=TORCH)
def test_functions_written_in_python_and_foreign_ones_run_on_pieces(world: World) -> None:
    _, x = _leaf(world)
    local = x.to_local().detach()
    with SkipDTensorDispatch():
        found = [
            F.softmax(x, 0),
            F.layer_norm(x, (2,)),
            torch.cat([x, x]),
            Square.apply(x),
            x[:1],
            x.numpy(force=True),
        ]
    assert not any(isinstance(y, DTensor) for y in found)
    assert torch.equal(found[0], F.softmax(local, 0))
    assert torch.equal(found[3], local * local)
    found[3].sum().backward()
    assert torch.equal(x.grad.to_local(), 2 * local)
