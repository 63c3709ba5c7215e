"""Reductions and losses across real ranks: values, gradients, placements, and what they communicate."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

TORCH = ("torch", "cuda")
# Sums of at most 40 numbers below 100, in float64.
TOLERANCE = 1e-12
PARTIAL_MAX = Partial("max")

Call = Callable[[Any], Any]
# Name -> (call, how the result of a tensor lies that is cut along dim 0, collectives of forward).
CALLS: dict[str, tuple[Call, Any, dict[str, int]]] = {
    "sum": (lambda x: x.sum(0), Partial(), {}),
    "mean": (lambda x: x.mean(), Partial(), {}),
    "amax": (lambda x: x.detach().amax(0), PARTIAL_MAX, {}),
    "largest": (lambda x: x.detach().max(), PARTIAL_MAX, {}),
    "all": (lambda x: (x > -10).all(0), Partial("all"), {}),
    "var": (lambda x: x.var(0), Partial(), {"all_reduce": 1}),
    "std": (lambda x: x.std(0, unbiased=False), Replicate(), {"all_reduce": 2}),
    "norm of order 1": (lambda x: torch.linalg.vector_norm(x, 1), Partial(), {}),
    "norm": (lambda x: x.norm(), Replicate(), {"all_reduce": 1}),
    "logsumexp": (lambda x: x.logsumexp(0), Replicate(), {"all_reduce": 2}),
    "values and indices": (lambda x: x.max(0)[0], Replicate(), {"all_gather": 2}),
    "argmin": (lambda x: x.argmin(), Replicate(), {"all_gather": 2}),
    "along the other dim": (lambda x: x.softmax(1), Shard(0), {}),
    "layer norm": (lambda x: F.layer_norm(x, (3,)), Shard(0), {}),
    "a dim that is cut is joined": (lambda x: x.softmax(0), Replicate(), {"all_gather": 1}),
    "squared errors": (lambda x: F.mse_loss(x, x * 2), Partial(), {}),
}


def _cut(x: torch.Tensor, world: World) -> Any:
    mesh = init_device_mesh(world.device_type, (world.size,))
    return distribute_tensor(x.clone().requires_grad_(x.is_floating_point()), mesh, [Shard(0)])


def _numbers(world: World, rows: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn((rows, 3), generator=generator, dtype=torch.float64).to(world.device)


@distributed([2, 4], backends=TORCH)
def test_reductions_communicate_no_more_than_their_results(world: World) -> None:
    for name, (call, placement, expected) in CALLS.items():
        for rows in (8, 5, 2):  # 5 and 2 rows leave the last of 4 ranks with none
            plain = _numbers(world, rows).requires_grad_()
            whole = call(plain)
            x = _cut(plain.detach(), world)
            label = f"{name} of {rows} rows"
            with count_collectives() as counted:
                found = call(x)
            if rows == 8:
                counted.assert_counts(**expected)
            assert isinstance(found, DTensor), label
            assert found.placements == (placement,), label
            assert_parity(found.full_tensor(), whole, rtol=TOLERANCE, atol=TOLERANCE, name=label)
            if whole.requires_grad:
                whole.sum().backward()
                found.sum().backward()
                assert_parity(x.grad, plain.grad, rtol=TOLERANCE, atol=TOLERANCE, name=f"gradient of {label}")


TIES: dict[str, Call] = {
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(),
    "max": lambda x: x.max(),
    "max along a dim": lambda x: x.max(0)[0],
    "aminmax": lambda x: sum(torch.aminmax(x)),
}


@distributed([2, 4], backends=TORCH)
def test_equal_elements_share_the_gradient_as_on_one_device(world: World) -> None:
    # Rank 0 of 2 has two of the three largest in the first column, and one of the three smallest of all.
    values = torch.tensor(
        [[7.0, -2], [7, 3], [1, 0], [7, -2], [0, -2]], dtype=torch.float64, device=world.device
    )
    for name, call in TIES.items():
        plain, x = values.clone().requires_grad_(), _cut(values, world)
        try:
            call(plain).sum().backward()
        except RuntimeError as error:
            # Not every torch knows the derivative of aminmax: then nor does a DTensor, and says so where it has elements.
            assert name == "aminmax", error
            refused = pytest.raises(RuntimeError, match=re.escape(str(error)))
            with refused if x.to_local().numel() else nullcontext():
                call(x).sum().backward()
            continue
        call(x).sum().backward()
        assert_parity(x.grad, plain.grad, rtol=TOLERANCE, atol=TOLERANCE, name=name)


@distributed([2, 4], backends=TORCH)
def test_mean_loss_counts_the_valid_targets_of_all_ranks(world: World) -> None:
    targets = torch.tensor([2, -100, -100, 1, 0], device=world.device)
    weights = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64, device=world.device)
    plain = _numbers(world).requires_grad_()
    for options in ({}, {"weight": weights}, {"label_smoothing": 0.1}):
        plain.grad = None
        whole = F.cross_entropy(plain, targets, **options)
        whole.backward()
        x = _cut(plain.detach(), world)
        with count_collectives() as counted:
            given = {n: _replicated(v, x) if isinstance(v, torch.Tensor) else v for n, v in options.items()}
            loss = F.cross_entropy(x, _cut(targets, world), given.pop("weight", None), **given)
        counted.assert_counts(all_reduce=1)
        assert counted.nbytes() == 8
        with count_collectives() as counted:
            loss.backward()
        counted.assert_counts()
        assert_parity(loss.full_tensor(), whole, rtol=TOLERANCE, name=f"loss {options}")
        assert_parity(x.grad, plain.grad, rtol=TOLERANCE, atol=TOLERANCE, name=f"gradient {options}")
    every = torch.full((5,), -100, device=world.device)
    assert F.cross_entropy(x, _cut(every, world)).full_tensor().isnan()


def _replicated(x: torch.Tensor, like: Any) -> Any:
    return DTensor.from_local(x, like.device_mesh, [Replicate()])


@distributed(2, backends=TORCH)
def test_second_derivative_of_a_variance_is_that_of_the_unsharded_one(world: World) -> None:
    plain = _numbers(world).requires_grad_()
    x = _cut(plain.detach(), world)
    for name, call in (
        ("var", lambda y: y.var(0)), ("norm", lambda y: y.norm(dim=0)), ("logsumexp", lambda y: y.logsumexp(0))
    ):  # fmt: skip
        seconds = []
        for y in (plain, x):
            (first,) = torch.autograd.grad((call(y) ** 2).sum(), y, create_graph=True)
            (second,) = torch.autograd.grad((first**2).sum(), y)
            seconds.append(second)
        assert_parity(seconds[1], seconds[0], rtol=TOLERANCE, atol=TOLERANCE, name=name)


@distributed(2, backends=TORCH)
def test_weights_of_a_norm_get_the_gradient_of_the_whole_batch(world: World) -> None:
    plain, weight = _numbers(world), torch.tensor([1.0, 2, 3], dtype=torch.float64, device=world.device)
    for function in (F.layer_norm, F.rms_norm):
        w = weight.clone().requires_grad_()
        (function(plain, (3,), w) ** 2).sum().backward()
        x = _cut(plain, world)
        own = DTensor.from_local(weight.clone(), x.device_mesh, [Replicate()]).requires_grad_()
        with count_collectives() as counted:
            (function(x, (3,), own) ** 2).sum().backward()
        counted.assert_counts(all_reduce=1)
        assert_parity(own.grad, w.grad, rtol=TOLERANCE, atol=TOLERANCE, name=function.__name__)


MISTAKES: dict[str, tuple[Call, str]] = {
    "no such dim": (lambda x: x.sum(2), "dim 2 does not fit a tensor with 2 dims"),
    "a dim twice": (lambda x: x.amax((0, 0)), "names a dim twice"),
    "a dim for keepdim": (lambda x: x.sum(0, 1), "keepdim must be True or False, got 1"),
    "more than there are": (lambda x: x.topk(9), "k = 9 of a dim of size 3"),
    "training": (
        lambda x: F.batch_norm(x[:1], None, None, training=True),
        "needs more than one value per channel",
    ),
    "old switches": (
        lambda x: F.mse_loss(x, x, size_average=True),
        "reduction='none', 'mean' or 'sum' instead",
    ),
    "no reduction": (
        lambda x: F.l1_loss(x, x, reduction="avg"),
        "reduction must be one of 'none', 'mean', 'sum', got 'avg'",
    ),
    "targets of another shape": (
        lambda x: F.cross_entropy(x, x.argmax(0)),
        r"takes targets of shape \(5,\), got \(3,\)",
    ),
    "not how it ends": (lambda x: F.layer_norm(x, (4,)), r"normalized_shape \(4,\) is not how the shape"),
    "a weight for a mean": (lambda x: F.mse_loss(x, x, weight=x), "mean of mse_loss with a weight"),
}


@distributed(2, backends=TORCH)
def test_mistakes_are_named(world: World) -> None:
    for call, message in MISTAKES.values():
        with pytest.raises(ValueError, match=message):
            call(_cut(_numbers(world), world))
