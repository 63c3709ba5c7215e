"""Hooks on gradients of parameters, torch.autograd, and grad modes."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from placed_tensors import TOLERANCE, TORCH, make_mesh, whole_of


@distributed(2, backends=TORCH)
def test_hooks_see_the_whole_gradient_as_dtensors_once(world: World) -> None:
    mesh, seen, done = make_mesh(world), [], []
    whole = whole_of(world, 4, 5).requires_grad_()
    x = distribute_tensor(whole_of(world, 4, 5), mesh, [Replicate()]).requires_grad_()
    w, u = (distribute_tensor(whole_of(world, 3, 5), mesh, [at]) for at in (Shard(0), Replicate()))
    weight = whole_of(world, 3, 5)
    x.register_post_accumulate_grad_hook(lambda p: done.append((p is x, p.grad is not None)))
    grads = []
    for h, one, other in ((whole * 2, weight, weight), (x * 2, w, u)):
        first = F.linear(h, one)
        h.register_hook(lambda g, grads=grads: grads.append(g))
        h.register_hook(lambda g: g * 2)
        h.retain_grad()
        loss = first.sum() + F.linear(h, one).exp().sum() + F.linear(h, other).sin().sum()
        loss.backward()
        seen.append(h.grad)
    assert done == [(True, True)] and isinstance(grads[1], DTensor)
    for mine, plain in ((grads[1], grads[0]), (seen[1], seen[0]), (x.grad, whole.grad)):
        assert_parity(mine, plain, rtol=TOLERANCE, atol=TOLERANCE)
    handle = x.register_hook(lambda g: torch.zeros(4, 5))
    with pytest.raises(ValueError, match="gradient that a hook returns must be a DTensor of shape"):
        x.sum().backward()
    handle.remove()
    (x * 2).sum().backward()


@distributed(2, backends=TORCH)
def test_hooks_on_several_gradients_see_dtensors(world: World) -> None:
    mesh, seen = make_mesh(world), []
    a, b = (distribute_tensor(whole_of(world, 4), mesh, [Shard(0)]).requires_grad_() for _ in range(2))
    torch.autograd.graph.register_multi_grad_hook((a, b), seen.append)
    (a * b).sum().backward()
    assert len(seen) == 1 and all(isinstance(g, DTensor) for g in seen[0])
    assert_parity(seen[0][0], whole_of(world, 4), exact=True)


@distributed(2, backends=TORCH)
def test_autograds_functions_give_the_unsharded_gradients(world: World) -> None:
    mesh = make_mesh(world)

    def leaves(at: Placement | None) -> list[Any]:
        whole = [whole_of(world, 4, 5), whole_of(world, 3, 5), whole_of(world, 2)]
        placed = whole if at is None else [distribute_tensor(t, mesh, [at]) for t in whole]
        return [t.requires_grad_() for t in placed]

    def loss(x: Any, w: Any) -> Any:
        return F.linear(x, w).sigmoid().sum()

    x, w, unused = leaves(None)
    plain = torch.autograd.grad(loss(x, w), [x, w])
    first = torch.autograd.grad(loss(x, w), [x], create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), [w])[0]
    for at in (Shard(0), Shard(1), Replicate()) if world.size == 2 else (Shard(0),):
        dx, dw, d_unused = leaves(None)[:2] + leaves(None)[2:]
        dx, dw = (distribute_tensor(t.detach(), mesh, [at]).requires_grad_() for t in (dx, dw))
        d_unused = distribute_tensor(d_unused.detach(), mesh, [Shard(0)]).requires_grad_()
        found = torch.autograd.grad([loss(dx, dw)], [dx, dw, d_unused], allow_unused=True)
        assert found[2] is None and all(g.placements == (at,) for g in found[:2])
        for mine, expected in zip(found[:2], plain, strict=True):
            assert_parity(mine, expected, rtol=TOLERANCE, atol=TOLERANCE)
        mine = torch.autograd.grad(loss(dx, dw), [dx], create_graph=True)[0]
        assert_parity(
            torch.autograd.grad(mine.square().sum(), [dw])[0], second, rtol=TOLERANCE, atol=TOLERANCE
        )
        torch.autograd.backward([loss(dx, dw), loss(dx, dw) * 2])
        assert_parity(dx.grad, plain[0] * 3, rtol=TOLERANCE, atol=TOLERANCE)
        dx.grad = dw.grad = None
        loss(dx, dw).backward(inputs=[dx])
        assert dx.grad is not None and dw.grad is None
        y = F.linear(dx, dw)
        torch.autograd.backward([y], [distribute_tensor(torch.ones_like(y.full_tensor()), mesh)])
        with pytest.raises(NotImplementedError, match="is_grads_batched runs vmap"):
            torch.autograd.grad(loss(dx, dw), [dx], is_grads_batched=True)
    del unused


@distributed(2, backends=TORCH)
def test_detaching_freezing_and_grad_modes(world: World) -> None:
    x = distribute_tensor(whole_of(world, 4), make_mesh(world), [Shard(0)]).requires_grad_()
    y = x * 2
    assert y.detach().to_local().data_ptr() == y.to_local().data_ptr() and not y.detach().requires_grad
    assert y.detach_() is y and not y.requires_grad and y.is_leaf
    x.requires_grad = False
    assert not (x * 2).requires_grad and x.requires_grad_().requires_grad
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x.mul_(2)
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.inference_mode():  # T12: such tensors have no version
        z = distribute_tensor(whole_of(world, 4), make_mesh(world), [Replicate()])
        assert (z * x).is_inference()
    h = x * 1
    h.view(2, 2).mul_(3)
    h.sum().backward()
    assert_parity(x.grad, torch.full_like(whole_of(world, 4), 3.0), exact=True)
    saved = (x * 1).exp()
    saved.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()
