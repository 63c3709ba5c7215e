"""Functions of torch that write, and the marks that writes end."""

import sys
from pathlib import Path

import torch

from hp_dtensor import Partial, Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from placed_tensors import TORCH, make_mesh


@distributed(world_size=2, backends=TORCH)
def test_a_mark_lives_until_its_backward_and_not_beyond_a_write(world: World) -> None:
    mesh = make_mesh(world)
    w = distribute_tensor(torch.ones(4, device=world.device, requires_grad=True), mesh, [Replicate()])
    x = distribute_tensor(torch.ones(5, 4, device=world.device), mesh, [Shard(0)])
    loss = (w * x).sum() + (w * x * 2).sum()
    assert len(w._marks.by_dims) == 1
    first = w._marks.by_dims[(0,)].marked
    with torch.no_grad():
        w.to_local().mul_(2)
    again = (w * x).sum()
    assert w._marks.by_dims[(0,)].marked is not first
    again.backward()
    assert w._marks.by_dims == {}
    with torch.no_grad():
        _ = w * x
    assert w._marks.by_dims == {}
    del loss


@distributed(world_size=2, backends=TORCH)
def test_a_keyword_that_asks_for_writing_writes(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    whole = torch.tensor([[-1.0, 2.0], [3.0, -4.0], [-5.0, 6.0]], dtype=torch.float64, device=world.device)
    modules = [
        torch.nn.ReLU(True),
        torch.nn.LeakyReLU(0.1, True),
        torch.nn.ELU(0.5, True),
        torch.nn.Hardtanh(inplace=True),
    ]
    for module in modules:
        for placement in (Replicate(), Shard(0), Shard(1), Partial()):
            plain = whole.clone().requires_grad_()
            leaf = distribute_tensor(whole, mesh, [Replicate()]).requires_grad_()
            y, x = plain.clone(), leaf.redistribute(placements=[placement]).clone()
            module(y), module(x)
            label = f"{module} of {placement}"
            assert x.placements == (placement,), label
            assert_parity(x.full_tensor(), y, exact=True, name=label)
            y.sum().backward()
            x.sum().backward()
            assert_parity(
                leaf.grad.full_tensor(), plain.grad, rtol=1e-14, atol=0, name=f"gradient of {label}"
            )
    x, plans = distribute_tensor(whole, mesh, [Shard(0)]), leaf._spec.plans
    modules[0](x)
    count = len(plans)
    for _ in range(5):
        modules[0](x)
    assert len(plans) == count


@distributed(world_size=2, backends=TORCH)
def test_writes_whose_operands_lie_otherwise_have_the_gradients_of_the_unsharded_program(
    world: World,
) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    x, y = (
        torch.arange(1.0, 7.0, dtype=torch.float64, device=world.device).reshape(3, 2) + i for i in (0, 3)
    )
    plain = [v.clone().requires_grad_() for v in (x, y)]
    leaves = [distribute_tensor(v, mesh, [Replicate()]).requires_grad_() for v in (x, y)]
    target = leaves[0].clone()
    target.mul_(leaves[1].redistribute(placements=[Partial()]))
    plain[0].clone().mul_(plain[1]).square().sum().backward()
    target.square().sum().backward()
    for found, expected in zip(leaves, plain, strict=True):
        assert_parity(found.grad.full_tensor(), expected.grad, rtol=1e-13, atol=0)
    summands = leaves[0].detach().redistribute(placements=[Partial()])
    assert_parity(summands.eq_(4.0).full_tensor(), x.clone().eq_(4.0), exact=True)
