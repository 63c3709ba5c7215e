"""Torch's own ways around autograd on DTensors: checkpointing, hooks of modules, compilation, transforms of functions."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_dtensor import DTensor, distribute_tensor
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from placed_leaves import Cube, inputs_of, placed_leaves, plain_leaves
from placed_tensors import S0, TORCH, R, assert_equal, make_mesh


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
    x, w = plain_leaves(world)
    CHECKPOINTS[text](x, w, reentrant).exp().sum().backward()
    for at in ((R, S0), (S0, R), (R, R)):
        dx, dw = placed_leaves(world, *at)
        CHECKPOINTS[text](dx, dw, reentrant).exp().sum().backward()
        for mine, plain in ((dx, x), (dw, w)):
            assert_equal(mine.grad, plain.grad, f"{at}")


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

    x, w = plain_leaves(world)
    run("plain", x, w.detach())
    for at in ((R, S0), (S0, R)):
        dx, dw = placed_leaves(world, *at)
        run(f"{at}", dx, dw.detach())
        assert all(isinstance(g, DTensor) for g in seen[f"{at}"])
        for mine, plain in zip(seen[f"{at}"], seen["plain"], strict=True):
            assert_equal(mine, plain, f"{at}")


# dynamo itself makes a Function, which torch deprecates, and tells of builtins that it cannot trace.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@distributed(2, backends=["torch"])
def test_compiled_code_breaks_its_graph_at_dtensors_and_gives_the_same_numbers(world: World) -> None:
    def program(x: Any, w: Any) -> Any:
        return (F.gelu(F.linear(x, w)) * 2 + 1).sum()

    # Not what inductor makes of it: that graphs break, and where.
    compiled = torch.compile(program, backend="eager")
    x, w = plain_leaves(world)
    program(x, w).backward()
    dx, dw = placed_leaves(world, R, S0)
    compiled(dx, dw).backward()
    assert_equal(dx.grad, x.grad)
    assert_equal(dw.grad, w.grad)
    whole = torch.compile(lambda x: Cube.apply(x, 2.0).sum(), backend="eager", fullgraph=True)
    x.grad = None
    whole(x).backward()
    assert_equal(x.grad, 6 * x.detach().square())


@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")
# Raised inside of torch's tracer, which does not look for errors there, it would end in a SystemError.
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@distributed(2, backends=TORCH)
def test_transforms_of_functions_are_refused(world: World) -> None:
    x = distribute_tensor(inputs_of(world)[0], make_mesh(world), [S0])

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
