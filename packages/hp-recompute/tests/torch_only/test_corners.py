"""What functions may do inside of a checkpoint, and what may happen around one: the plain call's numbers, or a refusal."""

from __future__ import annotations

import gc
import pickle
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_platform.testing import World, distributed
from hp_recompute import CheckpointError, checkpoint, checkpoint_exclude_wrapper, checkpoint_wrapper

sys.path.insert(0, str(Path(__file__).parent))
from checkpoint_calls import OPTIONS, WEIGHT, Run, assert_same, inner

NAMES = ["plain", "to the end", "products", "everything", "products, to the end", "operations", "all of it"]


def test_a_function_may_ask_for_gradients_inside() -> None:
    def forces(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        energy = inner(x, w)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return force * energy.exp() @ w

    def nested(run: Run, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        energy = run(inner, x, w)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return force * run(inner, energy, w)

    def program(run: Run, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = run(forces, x, w) + run(forces, x * 2, w) + run(nested, run, x, w)
        y.sum().backward()
        return y

    assert_same(program)


def test_a_function_may_go_backward_to_leaves_of_its_own() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        own = x.detach().requires_grad_()
        inner(own, w.detach()).sum().backward()
        return (x * own.grad).sin() @ w

    def program(run: Run, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = run(function, x, w)
        y.sum().backward()
        return y

    assert_same(program)


def test_casts_that_autocast_did_before_count_for_no_policy() -> None:
    def program(run: Run, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        first, second = (nn.Parameter(w.detach().float() + number) for number in range(2))

        def function(x: torch.Tensor) -> torch.Tensor:
            return F.gelu(F.gelu(x.float() @ first).float() @ second)

        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = run(function, x) + run(function, x * 2)  # the second call finds both weights cast
        with torch.autocast("cpu", enabled=False):
            y.float().sum().backward()
        return torch.cat([y.detach(), first.grad, second.grad])

    assert_same(program)


def test_what_was_made_in_inference_mode_may_be_an_argument() -> None:
    with torch.inference_mode():
        offset = torch.ones(4, 4, dtype=torch.float64)

    def program(run: Run, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            run(inner, x, w)
        y = run(lambda x, w, offset: inner(x, w) + offset, x, w, offset)
        y.sum().backward()
        return y

    assert_same(program)


def test_views_in_place_operations_and_inputs_may_come_out() -> None:
    def writes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.add_(1)
        z = y.sin()
        z.view(16)[:4].mul_(3)
        return z @ w

    def program(run: Run, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        base = x * 1
        whole, part = run(lambda x: (x, x.view(16)), base)
        assert whole is base
        part.mul_(2)
        y = run(writes, base, w)
        y.mul_(3)
        (y.sin() * base).sum().backward()
        return y

    assert_same(program, [each for each in OPTIONS if "policy_fn" not in each])
    # What comes after the last saved tensor is not asked for, so writing to it is no error.
    assert_same(program, [{"policy_fn": [torch.matmul]}])
    with pytest.raises(CheckpointError, match="aten.mm.default that the policy keeps was changed in place"):
        assert_same(program, [{"policy_fn": [torch.matmul], "early_stop": False}])


def test_functions_with_their_own_backward_may_ask_twice_and_keep_attributes() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = x @ w
            ctx.save_for_backward(x, w, y)
            ctx.kept = y.detach()
            return y.sin()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            _, w, y = ctx.saved_tensors
            x, _, _ = ctx.saved_tensors
            assert torch.equal(y, ctx.kept)
            g = g * ctx.kept.cos()
            return g @ w.t(), x.t() @ g

    def program(run: Run, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = run(lambda x, w: Product.apply(x.sin(), w).cos(), x, w)
        y.sum().backward()
        return y

    assert_same(program)


def test_an_excluded_part_that_draws_is_no_difference_for_draws_after_it_and_for_checks() -> None:
    once = checkpoint_exclude_wrapper(lambda x, w: F.dropout(x @ w, 0.5).sin())

    def program(run: Run, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = run(lambda x, w: F.dropout(once(x.sin(), w) @ w, 0.5).exp(), x, w)
        y.sum().backward()
        return y

    assert_same(program)


@pytest.mark.parametrize("needs_grad", [True, False])
def test_an_output_of_an_excluded_part_that_was_written_afterwards_is_told(needs_grad: bool) -> None:
    once = checkpoint_exclude_wrapper(lambda x: x * 2)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = once(x if needs_grad else x.detach())
        y.add_(1.0)
        return (y.sin() * x).sum()

    x = torch.arange(4.0, requires_grad=True)
    y = checkpoint(function, x)
    with pytest.raises(CheckpointError, match="excluded from recomputation, was changed in place afterwards"):
        y.backward()


@distributed(world_size=1)
def test_a_function_draws_again_alike_on_the_device_of_what_it_holds_itself(world: World) -> None:
    x = torch.linspace(-1, 1, 8, device=world.device).requires_grad_()

    def holding() -> torch.Tensor:
        return (x * torch.rand(8, device=world.device)).sin()

    found = []
    for run in (checkpoint, lambda function: function()):
        torch.manual_seed(3)
        x.grad = None
        y = run(holding)
        drawn = torch.rand(2, device=world.device)
        y.sum().backward()
        found.append((y.detach(), x.grad, drawn, torch.rand(2, device=world.device)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_graphs_of_several_threads_do_not_meet() -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        def program(run: Run, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = run(lambda x, w: run(inner, x * number, w).exp(), x, w)
            other = threading.Thread(target=y.sum().backward)
            other.start()
            other.join()
            return y.detach()

        try:
            x, w = (torch.full((4, 4), float(number), requires_grad=True) for _ in range(2))
            program(checkpoint, x, w)
            found = [x.grad, w.grad]
            x.grad = w.grad = None
            program(lambda function, *args: function(*args), x, w)
            assert torch.equal(found[0], x.grad) and torch.equal(found[1], w.grad)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_memory_goes_with_the_graph_and_needs_no_collector(options: dict[str, Any]) -> None:
    class Noted:
        """Lives as long as the arguments are kept."""

    calls = []

    def function(x: torch.Tensor, noted: Noted, fails: bool = False) -> torch.Tensor:
        calls.append(weakref.ref(noted))
        if fails and len(calls) % 2 == 0:
            raise KeyError("the second time")
        return checkpoint(inner, x, WEIGHT, **options).sin()

    x = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)
    # What torch imports at its first such call leaves frames behind for the collector, once.
    checkpoint(function, x, Noted(), **options).sum().backward()
    calls.clear()
    gc.collect()
    gc.disable()
    try:
        y = checkpoint(function, x, Noted(), **options).sum()
        y.backward(retain_graph=True)
        y.backward()
        assert calls[0]() is None, "after backward"
        y = checkpoint(function, x, Noted(), **options)
        del y
        assert calls[-1]() is None, "without backward"
        calls.clear()
        y = checkpoint(function, x, Noted(), True, **options).sum()
        with pytest.raises(KeyError):
            y.backward()
        del y
        assert calls[0]() is None, "after an error"
    finally:
        gc.enable()


def test_asking_outside_of_a_backward_leaves_nothing() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    found: list[weakref.ref[torch.Tensor]] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        middle = x.sin().exp()
        found.append(weakref.ref(middle.untyped_storage()))
        return middle.cos()

    y = checkpoint(function, x)
    assert torch.equal(y.grad_fn._saved_self, x.sin().exp())
    assert [each() for each in found] == [None, None]


@pytest.mark.parametrize("policy", ["full", [torch.matmul, F.gelu]], ids=["full", "selective"])
def test_checkpointed_modules_can_be_pickled(policy: Any) -> None:
    model = checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.GELU()), policy)
    x = torch.ones(2, 4)
    pickle.loads(pickle.dumps(model))(x).sum().backward()
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
