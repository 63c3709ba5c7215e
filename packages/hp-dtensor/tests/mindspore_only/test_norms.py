"""Normalisations of MindSpore: what is composed on cpu, the rules with it, and MindSpore's functions on DTensors."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_dtensor._mindspore.composed import norms
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, distributed

sys.path.extend((str(Path(__file__).parents[1]), str(Path(__file__).parent)))
from rule_cases import Cases, case, check, t
from spelled import check_call

F = mint.nn.functional
X = np.random.RandomState(0).randn(5, 3)
IMAGES = np.random.RandomState(1).randn(3, 4, 5)
W, B = np.array([0.5, 2.0, 1.25]), np.array([1.0, -1.0, 0.25])
W4, B4 = np.array([0.5, 2.0, 1.25, 3.0]), np.array([1.0, -1.0, 0.25, 0.0])


def _normalised(x: Any, axes: Any, eps: float) -> Any:
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


BY_NUMPY: dict[str, tuple[Callable[[], Any], Any]] = {
    "layer_norm": (
        lambda: norms.layer_norm(Tensor(X), (3,), Tensor(W), Tensor(B)),
        _normalised(X, -1, 1e-5) * W + B,
    ),
    "layer_norm over two dims": (
        lambda: norms.layer_norm(Tensor(IMAGES), (4, 5)),
        _normalised(IMAGES, (1, 2), 1e-5),
    ),
    "rms_norm": (
        lambda: norms.rms_norm(Tensor(X), (3,), Tensor(W), 1e-6),
        X / np.sqrt((X**2).mean(-1, keepdims=True) + 1e-6) * W,
    ),
    "batch_norm": (
        lambda: norms.batch_norm(Tensor(IMAGES), Tensor(B4), Tensor(W4), Tensor(W4), Tensor(B4)),
        (IMAGES - B4[:, None]) / np.sqrt(W4[:, None] + 1e-5) * W4[:, None] + B4[:, None],
    ),
}


@pytest.mark.parametrize("name", BY_NUMPY)
@distributed(world_size=1, backends="mindspore")
def test_what_is_composed_gives_the_values_of_numpy(name: str, world: World) -> None:
    compute, expected = BY_NUMPY[name]
    np.testing.assert_allclose(world.platform.to_numpy(compute()), expected, rtol=1e-12, atol=1e-12)


def _group_norm(x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    return ops.group_norm(x, groups, weight, bias, eps)


CASES: Cases = {}
case(CASES, "layer_norm", norms.layer_norm, t(5, 3), (3,), t(3), t(3), 1e-5)
case(CASES, "layer_norm", norms.layer_norm, t(2, 5, 3), (5, 3))
case(CASES, "rms_norm", norms.rms_norm, t(5, 3), (3,), t(3), 1e-6)
case(CASES, "rms_norm", norms.rms_norm, t(1, 3, 2), (2,))
case(CASES, "group_norm", _group_norm, t(3, 4, 5), 2, t(4), t(4), 1e-5)
case(CASES, "batch_norm", norms.batch_norm, t(3, 4, 2), t(4), t(4, low=0.5), t(4), t(4))


# A few dozen roundings in float64.
@pytest.mark.parametrize("name", CASES)
@distributed(world_size=1, backends="mindspore")
def test_norm_gives_values_and_gradients_of_the_unsharded_one(name: str, world: World) -> None:
    check(CASES[name], samples=2, tolerance=1e-8)


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
    "mint layer_norm": (
        lambda x, w, b: F.layer_norm(x, (3,), w, b),
        lambda x, w, b: norms.layer_norm(x, (3,), w, b),
        (X, W, B),
    ),
    "mint layer_norm without weights": (
        lambda x: F.layer_norm(x, (4, 5)),
        lambda x: norms.layer_norm(x, (4, 5)),
        (IMAGES,),
    ),
    "ops layer_norm": (
        lambda x, w, b: ops.layer_norm(x, (3,), w, b),
        lambda x, w, b: norms.layer_norm(x, (3,), w, b),
        (X, W, B),
    ),
    "LayerNorm": (
        lambda x, w, b: ops.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1, epsilon=1e-6)(x, w, b)[0],
        lambda x, w, b: norms.layer_norm(x, (3,), w, b, 1e-6),
        (X, W, B),
    ),
    "ops rms_norm": (
        lambda x, w: ops.rms_norm(x, w, 1e-6)[0],
        lambda x, w: norms.rms_norm(x, (3,), w, 1e-6),
        (X, W),
    ),
    "mint group_norm": (
        lambda x, w, b: F.group_norm(x, 2, w, b),
        lambda x, w, b: ops.group_norm(x, 2, w, b),
        (IMAGES, W4, B4),
    ),
    "mint batch_norm": (
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b),
        norms.batch_norm,
        (IMAGES, B4, W4, W4, B4),
    ),
    "ops L2Normalize": (
        lambda x: ops.L2Normalize(axis=1)(x),
        lambda x: x / mint.sqrt(mint.sum(x * x, 1, keepdim=True)),
        (X,),
    ),
    "mint normalize": (
        lambda x: F.normalize(x, dim=0),
        lambda x: x / mint.sqrt(mint.sum(x * x, 0, keepdim=True)),
        (X,),
    ),
}


@distributed(2, backends="mindspore")
def test_functions_of_mindspore_give_values_and_gradients_of_the_unsharded_tensors(world: World) -> None:
    for name, (call, expected, arrays) in CALLS.items():
        check_call(world, name, call, expected, [Tensor(array) for array in arrays])


@distributed(1, backends="mindspore")
def test_batch_norm_composed_in_training_gives_the_values_of_numpy(world: World) -> None:
    mean, var = Tensor(B4), Tensor(W4)
    y = norms.batch_norm(Tensor(IMAGES), mean, var, Tensor(W4), Tensor(B4), True, 0.3)
    own = [statistic.reshape(4, 1) for statistic in (W4, B4)]
    expected = _normalised(IMAGES, (0, 2), 1e-5) * own[0] + own[1]
    np.testing.assert_allclose(world.platform.to_numpy(y), expected, rtol=1e-12, atol=1e-12)
    for found, old, new in (
        (mean, B4, IMAGES.mean((0, 2))),
        (var, W4, IMAGES.transpose(1, 0, 2).reshape(4, -1).var(1, ddof=1)),
    ):
        # MindSpore rounds a number beside a tensor to float32.
        np.testing.assert_allclose(found.asnumpy(), 0.7 * old + 0.3 * new, rtol=0, atol=1e-7)


@distributed(2, backends="mindspore")
def test_batch_norm_in_training_has_the_statistics_of_the_whole_batch(world: World) -> None:
    mesh, platform = init_device_mesh(world.device_type, (2,)), world.platform
    calls: dict[str, Callable[..., Any]] = {
        "mint": lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b, True, 0.1, 1e-5),
        "ops": lambda x, m, v, w, b: ops.batch_norm(x, m, v, w, b, True, 0.1, 1e-5),
    }
    leaves = [platform.set_requires_grad_(Tensor(a), True) for a in (IMAGES, W4, B4)]
    statistics = [Tensor(B4), Tensor(W4)]
    whole = norms.batch_norm(leaves[0], *statistics, *leaves[1:], training=True, momentum=0.1)
    grads = platform.grad([whole], leaves, [Tensor(IMAGES)])
    for name, call in calls.items():
        for place in (Shard(0), Shard(2), Replicate()):
            x = distribute_tensor(Tensor(IMAGES), mesh, [place]).requires_grad_(True)
            own = [distribute_tensor(Tensor(a), mesh, [Replicate()]) for a in (B4, W4, W4, B4)]
            scale = [vector.requires_grad_(True) for vector in own[2:]]
            y = call(x, *own[:2], *scale)
            (y * distribute_tensor(Tensor(IMAGES), mesh, [place])).sum().backward()
            assert y.placements == (place,), name
            # The rule has eps and momentum as numbers, which MindSpore rounds to float32 beside tensors of float64.
            pairs = [(y.detach(), platform.detach(whole)), (x.grad, grads[0]), (scale[0].grad, grads[1])]
            for found, expected in (
                *pairs,
                (scale[1].grad, grads[2]),
                *zip(own[:2], statistics, strict=True),
            ):
                assert_parity(found, expected, rtol=0, atol=1e-8, name=f"{name} of {place}")


@distributed(2, backends="mindspore")
def test_stock_cells_of_batch_norm_train_with_plain_statistics(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    images = IMAGES.astype(np.float32)
    expected = _normalised(IMAGES, (0, 2), 1e-5)
    for make in (nn.BatchNorm1d, mint.nn.BatchNorm1d):
        cell = make(4, affine=False).set_train()
        flat = images.transpose(0, 2, 1).reshape(15, 4)
        y = cell(distribute_tensor(Tensor(flat), mesh, [Shard(0)]))
        found = world.platform.to_numpy(y.full_tensor()).reshape(3, 5, 4).transpose(0, 2, 1)
        # Numbers of about 1 in float32.
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
        mean = cell.moving_mean if hasattr(cell, "moving_mean") else cell.running_mean
        np.testing.assert_allclose(mean.asnumpy(), 0.1 * IMAGES.mean((0, 2)), rtol=0, atol=1e-6)
