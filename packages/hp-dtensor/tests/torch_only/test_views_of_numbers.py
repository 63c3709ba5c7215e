"""Matrices seen transposed and conjugated, their diagonals, and numbers in their parts: what is written into them, gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

TORCH = ("torch", "cuda")
R, S0, S1, S2, P = Replicate(), Shard(0), Shard(1), Shard(2), Partial()
# Sums of at most 60 products of numbers below 5, in float64.
TOLERANCE = 1e-12


def _whole(world: World, *shape: int, dtype: torch.dtype = torch.complex128) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype).to(world.device)


# Name -> (the view, the shape of what is seen, whether its numbers are complex, cuts that need no move).
VIEWS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], bool, tuple[int, ...]]] = {
    "mH": (lambda x: x.mH, (2, 5, 3), True, (0, 1, 2)),
    "mH of real numbers": (lambda x: x.mH, (2, 5, 3), False, (0, 1, 2)),
    "H": (lambda x: x.H, (5, 3), True, (0, 1)),
    "adjoint": (torch.adjoint, (5, 3), True, (0, 1)),
    "diagonal of matrices": (torch.linalg.diagonal, (5, 3, 3), True, (0,)),
    "diagonal of other dims": (
        lambda x: torch.linalg.diagonal(x, offset=1, dim1=0, dim2=2),
        (3, 5, 4),
        False,
        (1,),
    ),
    "pairs of complex numbers": (torch.view_as_real, (5, 3), True, (0, 1)),
    "pairs as complex numbers": (torch.view_as_complex, (5, 3, 2), False, (0, 1)),
    "real parts": (lambda x: x.real, (5, 3), True, (0, 1)),
    "imaginary parts": (lambda x: x.imag, (5, 3), True, (0, 1)),
}


@distributed([2, 3, 4], backends=TORCH)
def test_views_of_numbers_are_written_into_where_nothing_moved(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    for name, (view, shape, is_complex, kept) in VIEWS.items():
        whole = _whole(world, *shape, dtype=torch.complex128 if is_complex else torch.float64)
        for placement in (*map(Shard, range(len(shape))), R):
            label = f"{name} of {placement}"
            x, plain = distribute_tensor(whole.clone(), mesh, [placement]), whole.clone()
            with count_collectives() as counted:
                seen = view(x)
            assert_parity(
                seen.full_tensor(), view(plain).resolve_conj(), rtol=TOLERANCE, atol=TOLERANCE, name=label
            )
            if placement is R or placement.dim in kept:
                counted.assert_counts()
                seen.mul_(3.0).add_(1.0)
                view(plain).mul_(3.0).add_(1.0)
                assert_parity(x, plain, rtol=TOLERANCE, atol=TOLERANCE, name=label)
            else:
                counted.assert_counts(all_gather=1)
                with pytest.raises(ValueError, match="which is no view here: pieces had to move"):
                    seen.mul_(3.0)


@distributed([2, 3], backends=TORCH)
def test_gradients_and_shares_pass_views_of_numbers(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    for name, (view, shape, is_complex, _) in VIEWS.items():
        whole = _whole(world, *shape, dtype=torch.complex128 if is_complex else torch.float64)
        for placement in (*map(Shard, range(len(shape))), R, P, Partial("avg")):
            plain = whole.clone().requires_grad_()
            is_partial = placement.is_partial()
            x = distribute_tensor(whole.clone(), mesh, [R if is_partial else placement]).requires_grad_()
            seen = view(x.redistribute(placements=[placement]))
            assert not is_partial or seen.placements == (placement,)
            y, expected = (
                seen * (2.0 if is_partial else seen),
                view(plain) * (2.0 if is_partial else view(plain)),
            )
            (y.abs() ** 2).sum().backward()
            (expected.abs() ** 2).sum().backward()
            label = f"{name} of {placement}"
            assert_parity(
                y.full_tensor(), expected.resolve_conj(), rtol=TOLERANCE, atol=TOLERANCE, name=label
            )
            assert_parity(x.grad, plain.grad, rtol=1e-11, atol=1e-11, name=f"gradient of {label}")


@distributed(4, backends=TORCH)
def test_matrices_cut_along_both_dims_are_seen_transposed_and_conjugated(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2, 2))
    whole = _whole(world, 5, 3)
    x = distribute_tensor(whole, mesh, [S0, S1])
    with count_collectives() as counted:
        assert x.mH.placements == (S1, S0)
    counted.assert_counts()
    assert_parity((x.mH @ x).full_tensor(), whole.mH @ whole, rtol=TOLERANCE, atol=TOLERANCE)
    assert distribute_tensor(whole, mesh, [P, S0]).mH.placements == (P, S1)


@distributed(2, backends=TORCH)
def test_mistakes_of_views_of_numbers_are_told(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    x = distribute_tensor(_whole(world, 3, dtype=torch.float64), mesh, [S0])
    for call, text in (
        (lambda: x.mH, "dim -2 does not fit"),
        (lambda: torch.linalg.diagonal(x), "dim -2 does not fit"),
        (lambda: torch.view_as_complex(x), r"holds real and imaginary parts, got shape \(3,\)"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(RuntimeError, match="complex"):
        torch.view_as_real(x)
    factors = DTensor.from_local(_whole(world, 3), mesh, [Partial("prod")])
    for view in (torch.real, torch.imag, torch.view_as_real):
        with pytest.raises(NotImplementedError, match="prod of complex128"):  # not each rank's own
            view(factors)


@distributed(2, backends=TORCH)
def test_sums_of_numbers_are_cast_to_complex_ones(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    whole = _whole(world, 5, 2, dtype=torch.float64)
    x = distribute_tensor(whole, mesh, [R]).redistribute(placements=[P])
    calls: list[Callable[[Any], Any]] = [
        lambda x: x.to(torch.complex128),
        lambda x: x.cdouble(),
        lambda x: x.sum(0, dtype=torch.complex128),
    ]
    for call in calls:
        with count_collectives() as counted:
            found = call(x)
        counted.assert_counts()
        assert found.placements == (P,)
        assert_parity(found, call(whole), rtol=TOLERANCE, atol=TOLERANCE)
    assert_parity(
        DTensor.from_local(whole.cdouble() * (world.rank + 1), mesh, [Partial("avg")]),
        whole.cdouble() * 1.5,
        rtol=TOLERANCE,
        atol=TOLERANCE,
    )


@distributed([1, 2, 3], backends=TORCH)
def test_mantissas_and_exponents_are_those_of_the_whole(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    whole = _whole(world, 5, 2, dtype=torch.float64) * 100
    whole[1, 0] = 0.0
    for placement in (S0, S1, R, P, Partial("max")):
        plain = whole.clone().requires_grad_()
        is_partial = placement.is_partial()
        x = distribute_tensor(whole.clone(), mesh, [R if is_partial else placement]).requires_grad_()
        given = x.redistribute(placements=[placement])
        with count_collectives() as counted:
            found = torch.frexp(given)
        if is_partial and world.size > 1:
            counted.assert_counts(all_reduce=1)
        else:
            counted.assert_counts()
        expected = torch.frexp(plain)
        assert isinstance(found.mantissa, DTensor) and found.exponent.dtype == torch.int32
        assert found.mantissa.placements == found.exponent.placements == (R if is_partial else placement,)
        assert_parity(found.exponent, expected.exponent, exact=True, name=f"exponents of {placement}")
        assert_parity(found.mantissa, expected.mantissa, exact=True, name=f"mantissas of {placement}")
        (found.mantissa * found.mantissa).sum().backward()
        (expected.mantissa * expected.mantissa).sum().backward()
        assert_parity(x.grad, plain.grad, rtol=TOLERANCE, atol=TOLERANCE, name=f"gradient of {placement}")
        assert_parity(given.frexp()[0], expected.mantissa, exact=True)
