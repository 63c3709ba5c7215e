"""Foreign autograd Functions, torch's checkpointing, module hooks and torch.compile on DTensors: the unsharded gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from hp_dtensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

TORCH = ("torch", "cuda")
R, S0, S1 = Replicate(), Shard(0), Shard(1)
# A handful of products of some tens of numbers, in float64.
TOLERANCE = 1e-12


class Cube(torch.autograd.Function):
    """Saves its input; its second derivative goes through what is saved."""

    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * x * factor

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        (x,) = ctx.saved_tensors
        assert type(g) is type(x)
        return g * x * x * 3 * ctx.factor, None


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


def _mesh(world: World) -> DeviceMesh:
    return init_device_mesh(world.device_type, (world.size,))


def _inputs(world: World) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(world.device) * 0.4
        for shape in ((7, 5), (6, 5))
    ]


def _placed(world: World, *at: Placement) -> list[Any]:
    mesh = _mesh(world)
    return [distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(_inputs(world), at, strict=True)]


def _leaves(world: World) -> list[torch.Tensor]:
    return [t.requires_grad_() for t in _inputs(world)]


def _close(found: Any, expected: Any, name: str = "") -> None:
    assert_parity(found, expected, rtol=TOLERANCE, atol=TOLERANCE, name=name)


@pytest.mark.parametrize("text", PROGRAMS)
@distributed([2, 3], backends=TORCH)
def test_a_foreign_function_gives_the_unsharded_gradients(text: str, world: World) -> None:
    program = PROGRAMS[text]
    x, w = _leaves(world)
    y = program(x, w)
    y.sum().backward()
    for at in ((S0, R), (R, S0), (S1, S1), (R, R)):
        dx, dw = _placed(world, *at)
        found = program(dx, dw)
        assert isinstance(found, DTensor) and found.requires_grad
        _close(found, y.detach(), f"{at}")
        found.sum().backward()
        for mine, plain in ((dx, x), (dw, w)):
            assert mine.grad.placements == mine.placements
            _close(mine.grad, plain.grad, f"{at}")


@pytest.mark.parametrize("text", ["saved input", "saved output", "two inputs"])
@distributed(2, backends=TORCH)
def test_second_derivatives_go_through_what_is_saved(text: str, world: World) -> None:
    program = PROGRAMS[text]
    x, w = _leaves(world)
    (first,) = torch.autograd.grad(program(x, w).sum(), [x], create_graph=True)
    second = torch.autograd.grad(first.square().sum(), [x, w])
    for at in ((S0, R), (R, S0), (S1, S1)):
        dx, dw = _placed(world, *at)
        (mine,) = torch.autograd.grad(program(dx, dw).sum(), [dx], create_graph=True)
        _close(mine, first.detach(), f"{at}")
        for found, expected in zip(torch.autograd.grad(mine.square().sum(), [dx, dw]), second, strict=True):
            _close(found, expected, f"{at}")


@distributed(2, backends=TORCH)
def test_a_function_that_is_differentiable_once_says_so(world: World) -> None:
    dx, dw = _placed(world, S0, R)
    loss = (Doubled.apply(dx * 1).square() * dw.sum()).sum()
    (first,) = torch.autograd.grad(loss, [dx], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


@distributed(2, backends=TORCH)
def test_a_function_costs_the_communication_of_its_operations(world: World) -> None:
    dx, dw = _placed(world, R, S0)
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
    dx, _ = _placed(world, S0, R)
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

    dx, dw = _placed(world, S0, R)
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
    dx, _ = _placed(world, S0, R)
    plain = torch.ones(3, device=world.device, requires_grad=True)
    result = Keeps.apply(dx, plain, "kept")  # with it goes what its node keeps
    node = result.grad_fn
    found, beside = node.saved_tensors
    assert isinstance(found, DTensor) and found.placements == dx.placements and found.requires_grad
    assert torch.equal(found.full_tensor(), dx.full_tensor())
    assert beside is plain
    assert node.name == "kept"


def _block(x: Any, w: Any) -> Any:
    return F.linear(F.gelu(F.linear(x, w)), w.transpose(0, 1))


CHECKPOINTS = {
    "plain": lambda x, w, reentrant: checkpoint(_block, x, w, use_reentrant=reentrant),
    "closure": lambda x, w, reentrant: checkpoint(lambda x: _block(x, w), x, use_reentrant=reentrant),
    "twice": lambda x, w, reentrant: checkpoint(
        _block, checkpoint(_block, x, w, use_reentrant=reentrant).exp(), w, use_reentrant=reentrant
    ),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("text", CHECKPOINTS)
@distributed(2, backends=TORCH)
def test_torchs_checkpointing_gives_the_unsharded_gradients(text: str, world: World, reentrant: bool) -> None:
    x, w = _leaves(world)
    CHECKPOINTS[text](x, w, reentrant).exp().sum().backward()
    for at in ((R, S0), (S0, R), (R, R)):
        dx, dw = _placed(world, *at)
        CHECKPOINTS[text](dx, dw, reentrant).exp().sum().backward()
        for mine, plain in ((dx, x), (dw, w)):
            _close(mine.grad, plain.grad, f"{at}")


@distributed(2, backends=TORCH)
def test_hooks_of_modules_see_the_whole_gradients_as_dtensors(world: World) -> None:
    seen: dict[str, list[Any]] = {}

    def run(name: str, x: Any, w: Any) -> None:
        module = nn.Linear(5, 6, bias=False)
        module.weight = nn.Parameter(w)
        log = seen.setdefault(name, [])
        module.register_full_backward_pre_hook(lambda m, g: log.append(g[0]))
        module.register_full_backward_hook(lambda m, g_in, g_out: log.extend((g_in[0], g_out[0])))
        module.register_full_backward_hook(lambda m, g_in, g_out: (g_in[0] * 2,))
        module(x).exp().sum().backward()
        log.append(x.grad)

    x, w = _leaves(world)
    run("plain", x, w.detach())
    for at in ((R, S0), (S0, R)):
        dx, dw = _placed(world, *at)
        run(f"{at}", dx, dw.detach())
        assert all(isinstance(g, DTensor) for g in seen[f"{at}"])
        for mine, plain in zip(seen[f"{at}"], seen["plain"], strict=True):
            _close(mine, plain, f"{at}")


# dynamo itself makes a Function, which torch deprecates, and tells of builtins that it cannot trace.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@distributed(2, backends=["torch"])
def test_compiled_code_breaks_its_graph_at_dtensors_and_gives_the_same_numbers(world: World) -> None:
    def program(x: Any, w: Any) -> Any:
        return (F.gelu(F.linear(x, w)) * 2 + 1).sum()

    # Not what inductor makes of it: that graphs break, and where.
    compiled = torch.compile(program, backend="eager")
    x, w = _leaves(world)
    program(x, w).backward()
    dx, dw = _placed(world, R, S0)
    compiled(dx, dw).backward()
    _close(dx.grad, x.grad)
    _close(dw.grad, w.grad)
    whole = torch.compile(lambda x: Cube.apply(x, 2.0).sum(), backend="eager", fullgraph=True)
    x.grad = None
    whole(x).backward()
    _close(x.grad, 6 * x.detach().square())


@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")
# Raised inside of torch's tracer, which does not look for errors there, it would end in a SystemError.
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@distributed(2, backends=TORCH)
def test_transforms_of_functions_are_refused(world: World) -> None:
    x = distribute_tensor(_inputs(world)[0], _mesh(world), [S0])

    def program(x: Any) -> Any:
        return (x * x).sum()

    for call in (
        lambda: torch.vmap(program)(x),
        lambda: torch.func.grad(program)(x),
        lambda: torch.func.vjp(program, x),
        lambda: torch.func.jvp(program, (x,), (x,)),
        lambda: torch.jit.trace(program, (x,)),
        lambda: torch.einsum("ij,ij->i", x, x).numpy(),
    ):
        # The tracer of jit asks for memory, of which a DTensor has none.
        with pytest.raises((NotImplementedError, RuntimeError), match="for DTensors|data is not allocated"):
            call()
