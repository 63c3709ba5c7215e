"""Normalisations of MindSpore: what is composed on cpu, the rules with it, and MindSpore's functions on DTensors."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, mint, ops

from hp_dtensor import Shard, distribute_tensor
from hp_dtensor._mindspore.composed import norms
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed

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
def test_batch_norm_in_training_is_refused_with_ways_out(world: World) -> None:
    x = distribute_tensor(Tensor(IMAGES), init_device_mesh(world.device_type, (1,)), [Shard(0)])
    with pytest.raises(NotImplementedError, match=r"mindspore .*use\s+layer_norm or group_norm"):
        F.batch_norm(x, Tensor(B4), Tensor(W4), training=True)
