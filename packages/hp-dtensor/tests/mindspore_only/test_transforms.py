"""MindSpore's Fourier transforms and views of complex numbers on DTensors: values and gradients, beside numpy's."""

from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor, ops

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_platform import get_platform, init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

X = np.random.RandomState(0).randn(5, 4)
# Sums of at most 60 products of numbers below 60, in float64.
TOLERANCE = 1e-10


def _conjugated(function: Callable[..., Any], **kwargs: Any) -> Callable[[Any], Any]:
    """numpy has no hfft2: by the transform in the other direction, which has its factor where this one has none."""
    norm = {"backward": "forward", "forward": "backward", "ortho": "ortho"}[kwargs.pop("norm", "backward")]
    if function in (np.fft.irfft, np.fft.irfftn):
        return lambda x: function(np.conj(x), norm=norm, **kwargs)
    return lambda x: np.conj(function(x, norm=norm, **kwargs))


# Name -> (MindSpore's call, numpy's, whether it takes complex numbers, its dims).
CALLS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], bool, tuple[int, ...]]] = {
    "fft": (ops.fft, np.fft.fft, True, (1,)),
    "fft of real numbers": (
        lambda x: ops.fft(x, 7, 0, "ortho"),
        lambda x: np.fft.fft(x, 7, -2, "ortho"),
        False,
        (0,),
    ),
    "ifft": (
        lambda x: ops.ifft(x, norm="forward"),
        lambda x: np.fft.ifft(x, norm="forward"),
        True,
        (1,),
    ),
    "rfft": (lambda x: ops.rfft(x, dim=0), lambda x: np.fft.rfft(x, axis=-2), False, (0,)),
    "irfft": (lambda x: ops.irfft(x, 5), lambda x: np.fft.irfft(x, 5), True, (1,)),
    "hfft": (ops.hfft, _conjugated(np.fft.irfft), True, (1,)),
    "ihfft": (
        lambda x: ops.ihfft(x, n=3, norm="ortho"),
        _conjugated(np.fft.rfft, n=3, norm="ortho"),
        False,
        (1,),
    ),
    "fft2": (ops.fft2, np.fft.fft2, True, (0, 1)),
    "ifft2": (
        lambda x: ops.ifft2(x, (3, 6), (1, 0)),
        lambda x: np.fft.ifft2(x, (3, 6), (-1, -2)),
        True,
        (0, 1),
    ),
    "rfft2": (
        lambda x: ops.rfft2(x, norm="ortho"),
        lambda x: np.fft.rfft2(x, norm="ortho"),
        False,
        (0, 1),
    ),
    "irfft2": (lambda x: ops.irfft2(x, (4, 5)), lambda x: np.fft.irfft2(x, (4, 5)), True, (0, 1)),
    "hfft2": (ops.hfft2, _conjugated(np.fft.irfftn, axes=(-2, -1)), True, (0, 1)),
    "ihfft2": (
        lambda x: ops.ihfft2(x, norm="forward"),
        _conjugated(np.fft.rfftn, axes=(-2, -1), norm="forward"),
        False,
        (0, 1),
    ),
    "fftn": (
        lambda x: ops.fftn(x, (3,)),
        lambda x: np.fft.fftn(x, (3,), (-1,)),
        True,
        (1,),
    ),
    "ifftn": (lambda x: ops.ifftn(x, dim=(0,)), lambda x: np.fft.ifft(x, axis=-2), True, (0,)),
    "rfftn": (ops.rfftn, np.fft.rfft2, False, (0, 1)),
    "irfftn": (
        lambda x: ops.irfftn(x, (7,), (0,)),
        lambda x: np.fft.irfft(x, 7, axis=-2),
        True,
        (0,),
    ),
    "hfftn": (ops.hfftn, _conjugated(np.fft.irfftn, axes=(-2, -1)), True, (0, 1)),
    "ihfftn": (ops.ihfftn, _conjugated(np.fft.rfftn, axes=(-2, -1)), False, (0, 1)),
    "fftshift": (ops.fftshift, lambda x: np.fft.fftshift(x, (-2, -1)), True, (0, 1)),
    "ifftshift": (
        lambda x: ops.ifftshift(x, 0),
        lambda x: np.fft.ifftshift(x, -2),
        False,
        (0,),
    ),
    "adjoint": (ops.adjoint, lambda x: np.conj(np.swapaxes(x, -2, -1)), True, ()),
    "conj": (ops.conj, np.conj, True, ()),
    "mH": (lambda x: x.mH, lambda x: np.conj(np.swapaxes(x, -2, -1)), True, ()),
}


def _real(x: Any) -> Any:
    return np.stack([x.real, x.imag]) if np.iscomplexobj(x) else x


def _expected(call: Callable[[Any], Any], is_complex: bool, x: Any) -> tuple[Any, Any]:
    """The values, and the gradient of their sum with weights: what the linear call makes of each unit."""

    def run(x: Any) -> Any:
        return _real(call(x * (1 + 2j) if is_complex else x))

    values = run(x)
    weights = np.arange(1.0, 1 + values.size).reshape(values.shape)
    units = np.eye(x.size).reshape(x.size, *x.shape)
    gradient = np.array([(run(unit) * weights).sum() for unit in units]).reshape(x.shape)
    return values, gradient


def _check(world: World, mesh: Any, name: str, x: Any, placement: Any) -> None:
    call, of_numpy, is_complex, dims = CALLS[name]
    label = f"{name} of {x.shape} {placement}"
    values, gradient = _expected(of_numpy, is_complex, x)
    leaf = distribute_tensor(Tensor(x), mesh, [Replicate() if placement.is_partial() else placement])
    leaf = leaf.requires_grad_(True)
    given = leaf.redistribute(placements=[placement])
    given = ops.Complex()(given, given * 2) if is_complex else given
    given = given.redistribute(placements=[placement])
    with count_collectives() as counted:
        found = call(given)
    assert isinstance(found, DTensor), label
    joined = isinstance(placement, Shard) and placement.dim in dims and world.size > 1
    counted.assert_counts(**({"all_gather": 1} if joined else {}))
    if np.iscomplexobj(of_numpy(x * (1 + 2j) if is_complex else x)):
        found = ops.stack([ops.real(found), ops.imag(found)])
    assert_parity(found.detach(), Tensor(values), rtol=0, atol=TOLERANCE, name=label)
    weights = Tensor(np.arange(1.0, 1 + values.size).reshape(values.shape))
    (found * weights).sum().backward()
    assert_parity(leaf.grad, Tensor(gradient), rtol=0, atol=TOLERANCE, name=f"gradient of {label}")


@distributed((1, 2, 3, 4), backends="mindspore")
def test_transforms_give_the_values_and_gradients_of_numpy(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    for name in CALLS:
        for placement in (Shard(0), Shard(1), Replicate(), Partial()):
            _check(world, mesh, name, X, placement)
        _check(world, mesh, name, X[:2, :3], Shard(0))  # some ranks have nothing


@distributed(2, backends="mindspore")
def test_complex_numbers_are_seen_as_pairs(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    z = X[:, :2] + 1j * X[:, 2:]
    for placement in (Shard(0), Shard(1), Partial()):
        x = distribute_tensor(Tensor(z), mesh, [Replicate()]).redistribute(placements=[placement])
        found = ops.view_as_real(x)
        assert found.placements == (placement,)
        whole = get_platform().to_numpy(found.full_tensor())
        np.testing.assert_allclose(whole, np.stack([z.real, z.imag], -1), rtol=0, atol=TOLERANCE)
