"""Compiled functions and transforms of functions around checkpoints and inside of them."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_recompute import checkpoint, checkpoint_wrapper

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_calls import OPTIONS, Run, assert_same, inner


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.jacrev])
def test_function_transforms_are_refused_around_and_inside(transform: Any) -> None:
    x = torch.linspace(0, 1, 4)
    with pytest.raises(RuntimeError):
        transform(lambda x: checkpoint(torch.sin, x).sum())(x)
    if transform is not torch.func.vmap:
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            checkpoint(transform(lambda x: x.sin().sum()), x.requires_grad_())


# Where there is a GPU, a reset of dynamo imports inductor, which writes scripts of its own.
imports_inductor = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)


@imports_inductor
@pytest.mark.parametrize("options", OPTIONS[:3], ids=["plain", "to the end", "selective"])
def test_compiled_functions_may_be_checkpointed_and_checkpointed_ones_compiled(
    options: dict[str, Any],
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(inner, backend="aot_eager")

    def inside(run: Run, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = run(compiled, x, w)
        y.sum().backward()
        return y

    assert_same(inside, [options])
    plain = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    model = pickle.loads(pickle.dumps(plain))
    checkpoint_wrapper(model, **{name: value for name, value in options.items() if name == "early_stop"})
    x = torch.ones(3, 4)
    torch.compile(model, backend="aot_eager")(x).sum().backward()
    plain(x).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@imports_inductor
def test_a_compiled_module_runs_twice_when_it_is_checkpointed() -> None:
    torch._dynamo.reset()
    runs = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            runs.append(len(args))
            return graph.forward(*args)

        return run

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.gelu(self.up(x)))

    plain = Block()
    model = copy.deepcopy(plain)
    wrapped = checkpoint_wrapper(torch.compile(model, backend=backend))
    x = torch.ones(3, 4)
    y = wrapped(x)
    assert len(runs) == 1
    y.sum().backward()
    assert len(runs) == 2
    plain(x).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
