"""Running reductions and the largest few along a cut dim, across real ranks: what they give, and what they move."""

from collections.abc import Callable
from typing import Any

import torch

from hp_dtensor import Partial, Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

TORCH = ("torch", "cuda")
# Other orders of at most 13 additions, and products of at most 13 numbers below 4, in float64.
TOLERANCE = 1e-12

Call = Callable[[Any], Any]
# Name -> (call, all-gathers of forward, all-reduces of backward along one mesh dim).
RUNNING: dict[str, tuple[Call, int, int]] = {
    "cumsum": (lambda x: x.cumsum(0), 1, 1),
    "cumprod": (lambda x: x.cumprod(0), 1, 1),
    "logcumsumexp": (lambda x: x.logcumsumexp(0), 1, 1),
    "cummax": (lambda x: x.cummax(0).values, 2, 1),
    "cummin": (lambda x: torch.cummin(x, 0).values, 2, 1),
}


def _numbers(world: World, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (x * (x > -0.5)).to(world.device)  # some zeros, at which products have no quotients


def _cut(x: torch.Tensor, world: World) -> Any:
    mesh = init_device_mesh(world.device_type, (world.size,))
    return distribute_tensor(x.clone().requires_grad_(), mesh, [Shard(0)])


@distributed([1, 2, 3, 4], backends=TORCH)
def test_running_reductions_exchange_one_slice_per_rank(world: World) -> None:
    for name, (call, gathers, reductions) in RUNNING.items():
        for rows in (1, 5, 13):
            plain = _numbers(world, rows, 3).requires_grad_()
            weights = torch.arange(1.0, rows * 3 + 1, dtype=torch.float64, device=world.device).reshape(
                rows, 3
            )
            whole, x = call(plain), _cut(plain.detach(), world)
            label = f"{name} of {rows} rows"
            with count_collectives() as forward:
                found = call(x)
            if world.size > 1:
                forward.assert_counts(all_gather=gathers)
            assert found.placements == (Shard(0),), label
            (whole * weights).sum().backward()
            loss = (found * weights).sum()
            with count_collectives() as backward:
                loss.backward()
            if world.size > 1:
                backward.assert_counts(all_reduce=reductions)
            assert_parity(found.full_tensor(), whole, rtol=TOLERANCE, atol=TOLERANCE, name=label)
            assert_parity(x.grad, plain.grad, rtol=TOLERANCE, atol=TOLERANCE, name=f"gradient of {label}")


@distributed([2, 3], backends=TORCH)
def test_running_reductions_have_second_derivatives(world: World) -> None:
    def penalty(x: Any) -> Any:
        y = (x.cumsum(0) ** 2).cumprod(0)
        (gradient,) = torch.autograd.grad(y.sum(), [x], create_graph=True)
        return (gradient**2).sum()

    # Sums of squares of products: numbers up to 1e3.
    plain = (_numbers(world, 6, 2) * 0.5).requires_grad_()
    x = _cut(plain.detach(), world)
    penalty(plain).backward()
    penalty(x).backward()
    assert_parity(x.grad, plain.grad, rtol=1e-11, atol=1e-11, name="second derivative")


@distributed([2, 3], backends=TORCH)
def test_sums_stay_sums_through_a_running_sum_in_a_floating_dtype(world: World) -> None:
    plain = _numbers(world, 5, 3)
    x = distribute_tensor(plain, init_device_mesh(world.device_type, (world.size,)), [Partial()])
    for call in (
        lambda x: x.cumsum(0, dtype=torch.float64),
        lambda x: x.sum(0, dtype=torch.float64),
        lambda x: x.mean(0, dtype=torch.float64),
    ):
        with count_collectives() as counted:
            found = call(x)
        counted.assert_counts()
        assert found.placements == (Partial(),)
        assert_parity(found.full_tensor(), call(plain), rtol=TOLERANCE, atol=TOLERANCE, name="sum")
    assert x.sum(0, dtype=torch.int64).placements == (Replicate(),)  # truncation is not linear


@distributed([2, 4], backends=TORCH)
def test_few_of_many_are_found_among_the_best_of_each_rank(world: World) -> None:
    generator = torch.Generator().manual_seed(2)
    plain = (
        torch.randperm(61 * 3, generator=generator).double().reshape(61, 3).to(world.device).requires_grad_()
    )
    for largest in (True, False):
        values, at = torch.topk(plain, 3, 0, largest)
        x = _cut(plain.detach(), world)
        with count_collectives() as counted:
            best = torch.topk(x, 3, 0, largest)
        found, places = best.values, best.indices
        counted.assert_counts(all_gather=2)
        piece = 3 * 3 * 8  # bytes of 3 candidates in each of 3 columns
        assert counted.nbytes() <= 2 * piece * world.size
        assert found.placements == places.placements == (Replicate(),)
        assert_parity(found.full_tensor(), values, exact=True, name="values")
        assert_parity(places.full_tensor(), at, exact=True, name="places")
        plain.grad = None
        (values**2).sum().backward()
        (found**2).sum().backward()
        assert_parity(x.grad, plain.grad, exact=True, name="gradient")
    with count_collectives() as counted:  # more of them than it pays to send
        assert torch.topk(_cut(plain.detach(), world), 30, 0)[0].placements == (Replicate(),)
    counted.assert_counts(all_gather=1)


@distributed(2, backends=TORCH)
def test_equal_values_and_nan_are_found_with_places_where_they_are(world: World) -> None:
    plain = _numbers(world, 24, 2).round()
    plain[5, 0] = plain[17, 1] = float("nan")
    found, places = torch.topk(_cut(plain, world), 3, 0)
    values = torch.topk(plain, 3, 0)[0]
    there = plain.gather(0, places.full_tensor())
    for name, given in (("values", found.full_tensor()), ("values at the places", there)):
        assert_parity(given.nan_to_num(99), values.nan_to_num(99), exact=True, name=name)
    for column in places.full_tensor().T:
        assert len(set(column.tolist())) == 3
