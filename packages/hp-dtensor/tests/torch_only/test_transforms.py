"""Fourier transforms across real ranks: values and gradients of the unsharded program, and what moves for them."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fft

from hp_dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

TORCH = ("torch", "cuda")
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
# Sums of at most 60 squares of numbers below 20, in float64.
TOLERANCE = 1e-11

# Name -> (the call, whether it takes complex numbers, its dims of a tensor with two).
CALLS: dict[str, tuple[Callable[[Any], Any], bool, tuple[int, ...]]] = {
    "fft": (lambda x: fft.fft(x), True, (1,)),
    "fft of real numbers": (lambda x: fft.fft(x, dim=0, norm="ortho"), False, (0,)),
    "ifft, padded": (lambda x: fft.ifft(x, 9, -2, "forward"), True, (0,)),
    "fft, cut": (lambda x: fft.fft(x, n=2, dim=1), True, (1,)),
    "rfft": (lambda x: fft.rfft(x), False, (1,)),
    "irfft": (lambda x: fft.irfft(x, n=5), True, (1,)),
    "hfft": (lambda x: fft.hfft(x, dim=0, n=4), True, (0,)),
    "ihfft": (lambda x: fft.ihfft(x, norm="ortho"), False, (1,)),
    "fft2": (lambda x: fft.fft2(x), True, (0, 1)),
    "rfftn of one dim": (lambda x: fft.rfftn(x, s=(7,)), False, (1,)),
    "irfftn": (lambda x: fft.irfftn(x, (4, 6), norm="ortho"), True, (0, 1)),
    "fftn of no dim": (lambda x: fft.fftn(x, dim=()), True, ()),
    "fftshift": (lambda x: fft.fftshift(x), True, (0, 1)),
    "ifftshift of one dim": (lambda x: fft.ifftshift(x, 0), False, (0,)),
}
SHAPES = [(1, 5), (2, 3), (7, 4), (5, 1)]


def _whole(world: World, shape: tuple[int, ...], is_complex: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    dtype = torch.complex128 if is_complex else torch.float64
    return torch.randn(shape, generator=generator, dtype=dtype).to(world.device)


def _loss(y: Any) -> Any:
    y = torch.view_as_real(y.resolve_conj()) if y.dtype.is_complex else y
    weights = torch.arange(1.0, 1 + y.numel(), dtype=torch.float64, device=y.device).reshape(y.shape)
    return (y * y * weights).sum() + (y * weights).sum()


def _check(world: World, mesh: Any, name: str, shape: tuple[int, ...], lies: Sequence[Placement]) -> Any:
    """The result, after its values and the gradients were compared; and what was sent for the result."""
    call, is_complex, _ = CALLS[name]
    plain = _whole(world, shape, is_complex).requires_grad_()
    leaf = plain.detach().clone()
    x = distribute_tensor(leaf, mesh, [R if p.is_partial() else p for p in lies]).requires_grad_()
    given = x.redistribute(placements=lies)
    with count_collectives() as counted:
        found = call(given)
    expected = call(plain)
    label = f"{name} of {shape} {lies}"
    assert_parity(found, expected, rtol=TOLERANCE, atol=TOLERANCE, name=label)
    _loss(expected).backward()
    _loss(found).backward()
    assert x.grad is not None and plain.grad is not None
    assert_parity(x.grad, plain.grad, rtol=TOLERANCE, atol=1e-9, name=f"gradient of {label}")
    return found, counted


@distributed([1, 2, 3, 4], backends=TORCH)
def test_transforms_join_the_dims_along_which_they_go_and_no_others(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    for (name, (*_, dims)), shape in itertools.product(CALLS.items(), SHAPES):
        for placement in (S0, S1, R, P, Partial("avg")):
            found, counted = _check(world, mesh, name, shape, [placement])
            joined = isinstance(placement, Shard) and placement.dim in dims and world.size > 1
            if joined:
                counted.assert_counts(all_gather=1)
            else:
                counted.assert_counts()
            assert found.placements == ((R if joined else placement),) or world.size == 1, (
                name,
                shape,
                placement,
            )


@distributed(4, backends=TORCH)
def test_transforms_on_meshes_of_two_dims(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2, 2))
    for name, shape in itertools.product(CALLS, ((5, 3), (1, 7), (7, 4))):
        for lies in ([S0, S1], [S0, S0], [S1, R], [P, S0], [S1, P], [P, P], [R, S0]):
            _check(world, mesh, name, shape, lies)


@distributed([2, 3], backends=TORCH)
def test_what_a_transform_of_shares_gives_are_shares(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    generator = torch.Generator().manual_seed(world.rank)
    local = torch.randn((5, 3), generator=generator, dtype=torch.float64).to(world.device).requires_grad_()
    x = DTensor.from_local(local, mesh, [P])
    with count_collectives() as counted:
        y = fft.irfft(fft.rfft(x, dim=0) * 2.0, n=5, dim=0)
    counted.assert_counts()
    assert y.placements == (P,)
    assert_parity(y, 2 * x.full_tensor(), rtol=TOLERANCE, atol=TOLERANCE)
    loss = y.square().sum()
    with count_collectives() as counted:
        loss.backward()
    counted.assert_counts()
    assert_parity(local.grad, 8 * x.full_tensor(), rtol=TOLERANCE, atol=TOLERANCE)
    # Absolute values are not linear.
    assert fft.fft(x).abs().placements == (R,)
    # A largest value is not one of the transforms.
    assert fft.fft(DTensor.from_local(local.detach(), mesh, [Partial("max")])).placements == (R,)
    assert fft.fftshift(DTensor.from_local(local.detach(), mesh, [Partial("max")])).placements == (
        Partial("max"),
    )


@distributed([2, 4], backends=TORCH)
def test_weights_of_a_filter_get_the_sum_of_the_gradients(world: World) -> None:
    """A layer that multiplies spectra: lines are cut, its complex weight is not."""
    mesh = init_device_mesh(world.device_type, (world.size,))

    def program(x: Any, weight: Any) -> Any:
        return fft.irfft(fft.rfft(x) * weight, n=x.shape[-1])

    plain = [_whole(world, (5, 6), False), _whole(world, (4,), True)]
    x, weight = (t.clone().requires_grad_() for t in plain)
    _loss(program(x, weight)).backward()
    placed = [
        distribute_tensor(t.clone(), mesh, [p]).requires_grad_() for t, p in zip(plain, (S0, R), strict=True)
    ]
    with count_collectives() as forward:
        found = program(*placed)
    forward.assert_counts()
    loss = _loss(found)
    with count_collectives() as backward:
        loss.backward()
    backward.assert_counts(all_reduce=1)
    for own, expected in zip(placed, (x, weight), strict=True):
        assert_parity(own.grad, expected.grad, rtol=TOLERANCE, atol=1e-9)


@distributed([2, 3], backends=TORCH)
def test_transforms_have_second_derivatives(world: World) -> None:
    def penalty(x: Any) -> Any:
        y = fft.rfft2(x * x).abs().square().sum()
        (gradient,) = torch.autograd.grad(y, [x], create_graph=True)
        return (gradient**2).sum()

    mesh = init_device_mesh(world.device_type, (world.size,))
    for shape, placement in (((2, 3, 4), S0), ((1, 3, 4), S0), ((2, 3, 4), S1)):
        plain = _whole(world, shape, False).requires_grad_()
        x = distribute_tensor(plain.detach().clone(), mesh, [placement]).requires_grad_()
        penalty(plain).backward()
        penalty(x).backward()
        assert_parity(x.grad, plain.grad, rtol=1e-10, atol=1e-10, name=f"{shape} {placement}")


@distributed(2, backends=TORCH)
def test_mistakes_are_errors_on_all_ranks(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    x = distribute_tensor(_whole(world, (1, 4), False), mesh, [S0])  # the second rank has nothing
    z = distribute_tensor(_whole(world, (1, 4), True), mesh, [S0])
    for call, text in (
        (lambda: fft.fft(x, norm="unit"), r"norm is 'unit'; it is one of None, 'backward'"),
        (lambda: fft.fft(x, n=0), r"a transform of 0 numbers along dim 1 of shape \(1, 4\)"),
        (lambda: fft.irfft(x[:, :1]), "a transform of 0 numbers"),
        (lambda: fft.fft(x, dim=2), "dim 2 does not fit a tensor with 2 dims"),
        (lambda: fft.fftn(x, s=(1, 2, 3)), "names more dims than"),
        (lambda: fft.fft2(x, s=(3,)), "needs a size for each dim"),
        (lambda: fft.rfftn(x, dim=()), "at least one dim"),
        (lambda: fft.fft(x[0, 0]), "has no line to transform"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    for refused in (fft.rfft, fft.ihfft, fft.rfft2):
        with pytest.raises(RuntimeError, match=r"real(-valued)? input"):
            refused(z)
