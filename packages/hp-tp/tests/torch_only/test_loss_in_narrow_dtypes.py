"""Losses of 16 and 32 bits against float64 of the very same numbers: on cuda these take kernels. torch only: autograd is the oracle."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional

from hp_platform import init_device_mesh
from hp_platform.testing import World, count_collectives, distributed
from hp_tp import linear_cross_entropy, vocab_parallel_cross_entropy

TORCH = ("torch", "cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# How far a gradient may be off, of its largest value: rounded to the dtype, where it leaves the scores and where it leaves the
# layer; sums of float32 besides.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


@dataclass(frozen=True)
class Case:
    """A layer and the options of the loss behind it."""

    tokens: int
    classes: int
    is_weighted: bool = False
    label_smoothing: float = 0.0
    has_bias: bool = False
    reduction: str = "mean"
    ignore_index: int = -100
    chunk_size: int | None = None

    def numbers(self, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
        """Input, weight, bias, target, class weights and the incoming gradient."""
        made = torch.Generator().manual_seed(self.tokens)
        x, weight = (
            torch.randn(self.tokens, 32, generator=made),
            torch.randn(self.classes, 32, generator=made),
        )
        bias = torch.randn(self.classes, generator=made)
        target = torch.randint(0, self.classes, (self.tokens,), generator=made)
        target[1::3] = self.ignore_index
        rest = torch.rand(self.classes, generator=made) + 0.5, torch.rand(self.tokens, generator=made)
        layer = [y.to(dtype) for y in (x, weight / 4, bias)]
        return [y.to(device) for y in (*layer, target, *rest)]

    @property
    def options(self) -> dict[str, Any]:
        return {
            "reduction": self.reduction,
            "ignore_index": self.ignore_index,
            "label_smoothing": self.label_smoothing,
        }


CASES = [
    *(
        Case(11, 301, weighted, smoothing, bias, reduction, chunk_size=40)
        for weighted, smoothing, bias, reduction in itertools.product(
            (False, True), (0.0, 0.1), (False, True), ("mean", "none")
        )
    ),
    Case(40, 5000, True, 0.1, True, "sum"),
    Case(6, 3, True, 0.1, True),
    Case(1, 50, ignore_index=3),
    Case(7, 4999, ignore_index=7, chunk_size=2049),
]


def _cut(x: torch.Tensor, world: World, dim: int = 0) -> torch.Tensor:
    """This rank's classes, as a tensor of its own; none for the last ranks of few classes."""
    parts = x.chunk(world.size, dim)
    part = parts[world.rank] if world.rank < len(parts) else x.narrow(dim, 0, 0)
    return part.clone().requires_grad_()


def _check(found: Any, exact: torch.Tensor, atol: float, what: str) -> None:
    assert found is not None, f"{what}: no gradient"
    torch.testing.assert_close(
        found.double(), exact, rtol=0, atol=atol, msg=lambda text: f"{what}: {text}", equal_nan=True
    )


def _scaled(loss: torch.Tensor, incoming: torch.Tensor) -> torch.Tensor:
    return (loss * incoming).sum() if loss.ndim else loss


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@distributed((1, 2, 4), backends=TORCH)
def test_a_fused_loss_is_that_of_layer_and_loss_in_float64(dtype: torch.dtype, world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    for case in CASES:
        x, weight, bias, target, weights, incoming = case.numbers(dtype, world.device)
        weights = weights if case.is_weighted else None
        leaves = [y.double().requires_grad_() for y in (x, weight, bias)][: 2 + case.has_bias]
        wide = None if weights is None else weights.double()
        right = functional.cross_entropy(functional.linear(*leaves), target, wide, **case.options)
        exact = torch.autograd.grad(_scaled(right, incoming.double()), leaves)
        own = [x.clone().requires_grad_(), _cut(weight, world), _cut(bias, world)][: 2 + case.has_bias]
        loss = linear_cross_entropy(
            own[0],
            own[1],
            target,
            linear_bias=own[2] if case.has_bias else None,
            weight=weights,
            chunk_size=case.chunk_size,
            num_classes=case.classes,
            mesh=mesh,
            **case.options,
        )
        _scaled(loss, incoming).backward()
        assert loss.dtype == torch.float32
        right = right.detach()
        _check(loss.detach(), right, 1e-5 * max(1.0, float(right.abs().max())), f"{case}, loss")
        for name, leaf, whole in zip(("input", "weight", "bias"), own, exact, strict=False):
            atol = ROUNDING[dtype] * float(whole.abs().max())
            wanted = whole if name == "input" else _cut(whole, world).detach()
            _check(leaf.grad, wanted, atol, f"{case}, {name}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@distributed((1, 2, 4), backends=TORCH)
def test_a_loss_of_cut_logits_is_that_of_whole_ones_in_float64(dtype: torch.dtype, world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    for case in CASES:
        x, weight, bias, target, weights, incoming = case.numbers(torch.float32, world.device)
        weights = weights if case.is_weighted else None
        logits = functional.linear(x, weight, bias).to(dtype)
        leaf = logits.double().requires_grad_()
        wide = None if weights is None else weights.double()
        right = functional.cross_entropy(leaf, target, wide, **case.options)
        (exact,) = torch.autograd.grad(_scaled(right, incoming.double()), leaf)
        own = _cut(logits, world, 1)
        loss = vocab_parallel_cross_entropy(
            own, target, num_classes=case.classes, mesh=mesh, weight=weights, **case.options
        )
        _scaled(loss, incoming).backward()
        right = right.detach()
        _check(loss.detach(), right, 1e-5 * max(1.0, float(right.abs().max())), f"{case}, loss")
        atol = ROUNDING[dtype] * float(exact.abs().max())
        _check(own.grad, _cut(exact, world, 1).detach(), atol, f"{case}, logits")


@distributed((2, 4), backends=TORCH)
def test_kernels_take_one_small_collective_forward_and_none_backward(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    for smoothing, weighted, told in ((0.0, False, 3), (0.1, False, 4), (0.0, True, 4), (0.1, True, 6)):
        case = Case(11, 301, weighted, smoothing)
        *_, target, weights, _ = case.numbers(torch.float32, world.device)
        own = _cut(torch.randn(11, 301, device=world.device), world, 1)
        weights = weights if weighted else None
        with count_collectives() as counted:
            loss = vocab_parallel_cross_entropy(
                own, target, num_classes=301, mesh=mesh, weight=weights, **case.options
            )
        if world.platform.score_kernels(own) is None:
            counted.assert_counts(all_reduce=2)
        else:
            counted.assert_counts(all_gather=1)
            assert counted.nbytes() == world.size * told * 11 * 4
        with count_collectives() as counted:
            loss.backward()
        counted.assert_counts()


@distributed(2, backends=TORCH)
def test_a_second_derivative_is_that_of_float64(world: World) -> None:
    """Kernels have none: a backward that is recorded is composed."""
    mesh = init_device_mesh(world.device_type, (world.size,))
    case = Case(5, 20)
    x, weight, bias, target, _, _ = case.numbers(torch.float32, world.device)
    logits = functional.linear(x, weight, bias)
    leaf = logits.double().requires_grad_()
    (first,) = torch.autograd.grad(functional.cross_entropy(leaf, target), leaf, create_graph=True)
    (exact,) = torch.autograd.grad(first.square().sum(), leaf)
    own = _cut(logits, world, 1)
    loss = vocab_parallel_cross_entropy(own, target, num_classes=20, mesh=mesh)
    (first,) = torch.autograd.grad(loss, own, create_graph=True)
    (found,) = torch.autograd.grad(first.square().sum(), own)
    _check(found, _cut(exact, world, 1).detach(), 1e-6, "second derivative")
