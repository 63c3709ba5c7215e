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


NAN, INF = float("nan"), float("inf")
# Name -> (call, values): where torch has its own rule for the value or the gradient.
EDGES: dict[str, tuple[Call, list[Any]]] = {
    "deviation of equal numbers": (lambda x: x.std(), [3.0, 3.0, 3.0, 3.0, 3.0]),
    "deviations of equal numbers": (lambda x: torch.std_mean(x, 0)[0], [[3.0, 1.0], [3.0, 2.0], [3.0, 1.0]]),
    "largest, three times": (lambda x: torch.linalg.vector_norm(x, INF), [3.0, -3.0, 3.0, 0.0, 1.0]),
    "smallest, three times": (lambda x: torch.linalg.vector_norm(x, -INF), [3.0, -3.0, 3.0, 5.0, 7.0]),
    "root of zeros": (lambda x: torch.linalg.vector_norm(x, 0.5), [1.0, 0.0, 2.0, 0.0, 3.0]),
    "reciprocals of zeros": (lambda x: torch.linalg.vector_norm(x, -1), [1.0, 0.0, 2.0, 0.0, 3.0]),
    "ranks with -inf alone": (lambda x: x.logsumexp(0), [-INF, -INF, -INF, 1.0, 2.0]),
    "values by their name": (lambda x: x.max(0).values, [[1.0, 5.0], [2.0, 4.0], [2.0, 5.0]]),
    "places by their name": (lambda x: x.min(0).indices, [[1.0, 5.0], [2.0, 4.0], [2.0, 5.0]]),
    "extremes by their name": (lambda x: torch.aminmax(x.detach(), dim=0).max, [[1.0], [5.0], [2.0]]),
}  # fmt: skip


def _told(x: torch.Tensor) -> torch.Tensor:
    """With a number for NaN, which equals nothing."""
    return x.nan_to_num(nan=1e6)


@distributed([2, 4], backends=TORCH)
def test_torchs_own_rules_for_edges_hold(world: World) -> None:
    for name, (call, values) in EDGES.items():
        plain = torch.tensor(values, dtype=torch.float64, device=world.device, requires_grad=True)
        x = _cut(plain.detach(), world)
        whole, found = call(plain), call(x)
        assert_parity(_told(found.full_tensor()), _told(whole), rtol=TOLERANCE, atol=TOLERANCE, name=name)
        if whole.requires_grad:
            whole.sum().backward()
            found.sum().backward()
            assert_parity(x.grad, plain.grad, rtol=TOLERANCE, atol=TOLERANCE, name=f"gradient of {name}")


@distributed(4, backends=TORCH)
def test_equal_elements_share_the_gradient_where_two_mesh_dims_cut_one_dim(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2, 2))
    plain = torch.tensor([5.0, 1.0, 1.0, 5.0, 5.0], dtype=torch.float64, device=world.device).requires_grad_()
    x = distribute_tensor(plain.detach().requires_grad_(), mesh, [Shard(0), Shard(0)])
    plain.amax().backward()
    x.amax().backward()
    assert_parity(x.grad, plain.grad, rtol=TOLERANCE, atol=TOLERANCE)


# Name -> (call of two tensors, the number that fills them): sums that leave the range of half precision, whose results do not.
HALVES: dict[str, tuple[Callable[..., Any], float]] = {
    "mean": (lambda x, _: x.mean(), 30.0),
    "nanmean of few": (lambda x, _: x[:100].nanmean(), 30.0),
    "var": (lambda x, _: (x * _signs(x)).var(), 30.0),
    "std": (lambda x, _: (x * _signs(x)).std(), 30.0),
    "norm": (lambda x, _: x.norm(), 30.0),
    "norm of order 3": (lambda x, _: torch.linalg.vector_norm(x, 3), 30.0),
    "squared errors": (lambda x, y: F.mse_loss(x, y), 30.0),
}  # fmt: skip


def _signs(x: Any) -> torch.Tensor:
    return torch.arange(3001, device=x.device).remainder(2).mul(2).sub(1).half()


@distributed(2, backends=TORCH)
def test_sums_of_half_precision_do_not_overflow_where_the_result_does_not(world: World) -> None:
    for name, (call, value) in HALVES.items():
        plain = torch.full((3001,), value, dtype=torch.float16, device=world.device)
        zeros = torch.zeros_like(plain)
        expected = call(plain, zeros)
        found = call(_cut(plain, world), _cut(zeros, world))
        assert found.dtype == expected.dtype == torch.float16, name
        # A result has 11 bits, and two of them are added.
        assert_parity(found.full_tensor(), expected, rtol=2**-9, atol=0, name=name)
        assert expected.isfinite(), name


@distributed(2, backends=TORCH)
def test_targets_are_counted_exactly_under_autocast(world: World) -> None:
    scores = torch.zeros((5001, 3), dtype=torch.bfloat16, device=world.device)
    targets = torch.ones(5001, dtype=torch.int64, device=world.device)
    with torch.autocast(world.device_type, dtype=torch.bfloat16):
        whole = F.cross_entropy(scores, targets)
        found = F.cross_entropy(_cut(scores, world), _cut(targets, world))
        one = F.cross_entropy(_cut(scores[:1], world), _cut(targets[:1], world))
        x, weight, bias = (torch.ones(s, device=world.device) for s in ((2, 1), (2, 1), (2,)))
        mesh = init_device_mesh(world.device_type, (2,))
        cut = [
            distribute_tensor(v, mesh, [p])
            for v, p in ((x, Shard(1)), (weight, Shard(1)), (bias, Replicate()))
        ]
        product = F.linear(*cut)  # the last rank has nothing to contract
    assert found.dtype == torch.float32
    assert_parity(found.full_tensor(), whole, rtol=1e-6, atol=0)
    assert_parity(one.full_tensor(), whole, rtol=1e-6, atol=0)
    assert product.dtype == torch.bfloat16
    assert_parity(
        product.full_tensor(), torch.full((2, 2), 2.0, dtype=torch.bfloat16, device=world.device), exact=True
    )


@distributed(2, backends=TORCH)
def test_bytes_have_any_and_all(world: World) -> None:
    numbers = torch.tensor([0, 1, 2, 0, 5], dtype=torch.uint8, device=world.device)
    x = _cut(numbers, world)
    assert_parity(x.any().full_tensor(), numbers.any(), exact=True)
    assert_parity(x.all(0).full_tensor(), numbers.all(0), exact=True)


@distributed(2, backends=TORCH)
def test_a_factor_of_zero_keeps_a_nan_out_also_where_a_rank_has_nothing_to_multiply(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    added = torch.full((2, 2), NAN, dtype=torch.float64, device=world.device)
    a, b = (torch.ones(s, dtype=torch.float64, device=world.device) for s in ((2, 1), (1, 2)))
    placements = ([Shard(1)], [Shard(1)], [Shard(0)])
    cut = [distribute_tensor(v, mesh, p) for v, p in zip((added, a, b), placements, strict=True)]
    assert_parity(torch.addmm(*cut, beta=0).full_tensor(), torch.addmm(added, a, b, beta=0), exact=True)
