"""Foreign autograd Functions on DTensors: the unsharded gradients."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from hp_dtensor import DTensor
from hp_platform.testing import World, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from placed_leaves import Cube, placed_leaves, plain_leaves
from placed_tensors import S0, S1, TORCH, R, assert_equal


class Exponential(torch.autograd.Function):
    """Saves its output, and splits forward from the set-up of its context."""

    @staticmethod
    def forward(x: Any) -> Any:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * ctx.saved_tensors[0]


class Product(torch.autograd.Function):
    """Two inputs, two outputs, of which one has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        y = F.linear(x, w)
        mask = y > 0
        ctx.mark_non_differentiable(mask)
        return y, mask

    @staticmethod
    def backward(ctx: Any, g: Any, _: Any) -> Any:
        x, w = ctx.saved_tensors
        return (
            g @ w if ctx.needs_input_grad[0] else None,
            g.transpose(0, 1) @ x if ctx.needs_input_grad[1] else None,
        )


class Doubled(torch.autograd.Function):
    """Writes into its input."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Any) -> Any:
        return g * 2


class Identity(torch.autograd.Function):
    """Returns its input as it is."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * 3


class Plain(torch.autograd.Function):
    """Its backward forgets to return a DTensor."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g.to_local() if isinstance(g, DTensor) else g


PROGRAMS = {
    "saved input": lambda x, w: Cube.apply(x * 1, 2.0) * F.linear(x, w).sum(),
    "saved output": lambda x, w: Exponential.apply(x) * F.linear(x, w).sum(),
    "two inputs": lambda x, w: Product.apply(x, w)[0].sigmoid(),
    "mask": lambda x, w: torch.where(
        Product.apply(x, w)[1], Product.apply(x * 2, w)[0].exp(), F.linear(x, w)
    ),
    "written in place": lambda x, w: Doubled.apply(x * 1).exp() * w.sum(),
    "input returned": lambda x, w: Identity.apply(x * 1).exp() * w.sum(),
    "input of a sum": lambda x, w: Cube.apply(F.linear(x, w).sum(0), 1.0),
    "one after another": lambda x, w: Cube.apply(Exponential.apply(Product.apply(x, w)[0]), 0.5),
}


@pytest.mark.parametrize("text", PROGRAMS)
@distributed([2, 3], backends=TORCH)
def test_a_foreign_function_gives_the_unsharded_gradients(text: str, world: World) -> None:
    program = PROGRAMS[text]
    x, w = plain_leaves(world)
    y = program(x, w)
    y.sum().backward()
    for at in ((S0, R), (R, S0), (S1, S1), (R, R)):
        dx, dw = placed_leaves(world, *at)
        found = program(dx, dw)
        assert isinstance(found, DTensor) and found.requires_grad
        assert_equal(found, y.detach(), f"{at}")
        found.sum().backward()
        for mine, plain in ((dx, x), (dw, w)):
            assert mine.grad.placements == mine.placements
            assert_equal(mine.grad, plain.grad, f"{at}")


@pytest.mark.parametrize("text", ["saved input", "saved output", "two inputs"])
@distributed(2, backends=TORCH)
def test_second_derivatives_go_through_what_is_saved(text: str, world: World) -> None:
    program = PROGRAMS[text]
    x, w = plain_leaves(world)
    (first,) = torch.autograd.grad(program(x, w).sum(), [x], create_graph=True)
    second = torch.autograd.grad(first.square().sum(), [x, w])
    for at in ((S0, R), (R, S0), (S1, S1)):
        dx, dw = placed_leaves(world, *at)
        (mine,) = torch.autograd.grad(program(dx, dw).sum(), [dx], create_graph=True)
        assert_equal(mine, first.detach(), f"{at}")
        for found, expected in zip(torch.autograd.grad(mine.square().sum(), [dx, dw]), second, strict=True):
            assert_equal(found, expected, f"{at}")


@distributed(2, backends=TORCH)
def test_a_function_that_is_differentiable_once_says_so(world: World) -> None:
    dx, dw = placed_leaves(world, S0, R)
    loss = (Doubled.apply(dx * 1).square() * dw.sum()).sum()
    (first,) = torch.autograd.grad(loss, [dx], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


@distributed(2, backends=TORCH)
def test_a_function_costs_the_communication_of_its_operations(world: World) -> None:
    dx, dw = placed_leaves(world, R, S0)
    y = Product.apply(dx, dw)[0]
    assert y.placements == (S1,)
    with count_collectives() as counted:
        y.sum().redistribute().backward()
    # The gradient of the replicated input is a sum; the loss is one, too.
    counted.assert_counts(all_reduce=2)
    with count_collectives() as counted, torch.no_grad():
        assert not Product.apply(dx, dw)[0].requires_grad
        assert isinstance(Identity.apply(dx), DTensor)
    counted.assert_counts()


@distributed(2, backends=TORCH)
def test_a_backward_must_return_dtensors(world: World) -> None:
    dx, _ = placed_leaves(world, S0, R)
    with pytest.raises(ValueError, match="gradient of input 0 by Plain must be a DTensor of shape"):
        Plain.apply(dx).sum().backward()


@distributed(2, backends=TORCH)
def test_plain_functions_are_as_before(world: World) -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    y = Cube.apply(x, 2.0)
    assert y.grad_fn.name() == "CubeBackward"
    y.sum().backward()
    assert x.grad.tolist() == [6.0] * 3


@distributed(2, backends=TORCH)
def test_saved_tensors_hooks_see_plain_tensors(world: World) -> None:
    seen: list[type] = []

    def pack(x: Any) -> Any:
        seen.append(type(x))
        return x

    dx, dw = placed_leaves(world, S0, R)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = (Cube.apply(dx, 1.0) * F.linear(dx, dw).sum()).sum()
    assert set(seen) == {torch.Tensor}
    with torch.autograd.graph.save_on_cpu():
        loss = loss + F.linear(dx, dw).exp().sum()
    loss.backward()


class Keeps(torch.autograd.Function):
    """Keeps its input for who holds the node; its output is a plain tensor."""

    @staticmethod
    def forward(x: Any, y: Any, name: str) -> Any:
        return torch.empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.name = inputs[2]

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return None, None, None


@distributed(2, backends=TORCH)
def test_a_node_gives_back_the_dtensors_that_it_keeps(world: World) -> None:
    dx, _ = placed_leaves(world, S0, R)
    plain = torch.ones(3, device=world.device, requires_grad=True)
    result = Keeps.apply(dx, plain, "kept")  # with it goes what its node keeps
    node = result.grad_fn
    found, beside = node.saved_tensors
    assert isinstance(found, DTensor) and found.placements == dx.placements and found.requires_grad
    assert torch.equal(found.full_tensor(), dx.full_tensor())
    assert beside is plain
    assert node.name == "kept"
