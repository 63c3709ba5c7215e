"""Convolutions of MindSpore: what is composed on cpu, the rules with it, and MindSpore's functions and objects on DTensors."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, mint, ops

from hp_dtensor._mindspore.composed.convolution import convolution
from hp_platform.testing import World, assert_parity, distributed

sys.path.extend((str(Path(__file__).parents[1]), str(Path(__file__).parent)))
from rule_cases import Cases, case, check, t
from spelled import check_call

F = mint.nn.functional
_DRAW = np.random.RandomState(0)
X, W, B = _DRAW.randn(2, 4, 5, 6), _DRAW.randn(6, 4, 3, 2), _DRAW.randn(6)
GROUPED = _DRAW.randn(6, 2, 3, 2)
ROW, OF_ROW = _DRAW.randn(3, 2, 7), _DRAW.randn(4, 2, 3)
BOX, OF_BOX = _DRAW.randn(1, 2, 3, 3, 3), _DRAW.randn(2, 2, 2, 2, 2)


def _by_numpy(x: Any, w: Any, b: Any, stride: int, padding: int, dilation: int, groups: int) -> Any:
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    n, _, rows, columns = x.shape
    out, per_group, kh, kw = w.shape
    sizes = [(s - dilation * (k - 1) - 1) // stride + 1 for s, k in ((rows, kh), (columns, kw))]
    y = np.zeros((n, out, *sizes))
    for o in range(out):
        first = o // (out // groups) * per_group
        for i in range(sizes[0]):
            for j in range(sizes[1]):
                at = np.s_[
                    :,
                    first : first + per_group,
                    i * stride : i * stride + dilation * (kh - 1) + 1 : dilation,
                    j * stride : j * stride + dilation * (kw - 1) + 1 : dilation,
                ]
                y[:, o, i, j] = (x[at] * w[o]).sum((1, 2, 3)) + b[o]
    return y


@distributed(world_size=1, backends="mindspore")
def test_what_is_composed_gives_the_values_of_numpy(world: World) -> None:
    for weight, options in ((W, (1, 0, 1, 1)), (W, (2, 1, 1, 1)), (W, (1, 2, 2, 1)), (GROUPED, (2, 1, 1, 2))):
        found = world.platform.to_numpy(convolution(Tensor(X), Tensor(weight), Tensor(B), *options))
        expected = _by_numpy(X, weight, B, *options)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12, err_msg=str(options))


@distributed(world_size=1, backends="mindspore")
def test_what_is_composed_gives_the_values_and_gradients_of_the_kernels_in_float32(world: World) -> None:
    for x, w, kernel in ((X, W, ops.conv2d), (BOX, OF_BOX, ops.conv3d)):
        results = []
        for function in (convolution, kernel):
            leaves = [Tensor(v.astype(np.float32)) for v in (x, w)]
            leaves = [world.platform.set_requires_grad_(v, True) for v in leaves]
            y = function(*leaves)
            results.append((y, *world.platform.grad([y], leaves, [world.platform.detach(y)])))
        for own, native in zip(*results, strict=True):
            # Sums of a few hundred products below 10.
            assert_parity(world.platform.detach(own), world.platform.detach(native), rtol=1e-4, atol=1e-3)


CASES: Cases = {}
case(CASES, "conv2d", convolution, t(2, 3, 4, 5), t(4, 3, 3, 2), t(4), 1, 1)
case(CASES, "conv2d", convolution, t(3, 2, 5, 3), t(2, 2, 3, 3), None, 2, "valid")
case(CASES, "conv2d", convolution, t(1, 4, 3, 3), t(4, 2, 2, 2), t(4), 1, "same", 1, 2)
case(CASES, "conv1d", convolution, t(3, 2, 8), t(3, 2, 3), t(3), 1, 2, 2)
case(CASES, "conv3d", convolution, t(2, 2, 3, 3, 2), t(3, 2, 2, 2, 1), t(3))


# Sums of up to 36 products below 15 in float64.
@pytest.mark.parametrize("name", CASES)
@distributed(world_size=1, backends="mindspore")
def test_convolution_gives_values_and_gradients_of_the_unsharded_one(name: str, world: World) -> None:
    check(CASES[name], samples=2, tolerance=1e-8)


def _same(x: Any, w: Any) -> Any:
    # 5 rows by 3 with a step of 2: 1 before and 1 after; 6 columns by 2: none.
    return convolution(ops.pad(x, (0, 0, 1, 1)), w, None, 2)


def _same_unevenly(x: Any, w: Any) -> Any:
    # 6 columns by 2: one after.
    return convolution(ops.pad(x, (0, 1, 1, 1)), w)


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
    "mint conv1d": (F.conv1d, convolution, (ROW, OF_ROW)),
    "mint conv2d": (
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
        lambda x, w, b: convolution(x, w, b, 2, 1),
        (X, W, B),
    ),
    "mint conv2d in groups": (
        lambda x, w: F.conv2d(x, w, padding="same", groups=2),
        lambda x, w: convolution(x, w, None, 1, "same", 1, 2),
        (X, GROUPED),
    ),
    "mint conv2d of one image": (F.conv2d, convolution, (X[0], W)),
    "mint conv3d": (F.conv3d, convolution, (BOX, OF_BOX)),
    "Conv2D": (ops.Conv2D(6, (3, 2)), convolution, (X, W)),
    "Conv2D padded": (
        ops.Conv2D(6, (3, 2), pad_mode="pad", pad=(1, 1, 2, 2), dilation=2),
        lambda x, w: convolution(x, w, None, 1, (1, 2), 2),
        (X, W),
    ),
    "Conv2D of the same size": (ops.Conv2D(6, (3, 2), pad_mode="same", stride=2), _same, (X, W)),
    "Conv2D of the same size, unevenly": (ops.Conv2D(6, (3, 2), pad_mode="same"), _same_unevenly, (X, W)),
    "Conv2D in groups": (
        ops.Conv2D(6, (3, 2), group=2),
        lambda x, w: convolution(x, w, None, 1, 0, 1, 2),
        (X, GROUPED),
    ),
    "Conv3D": (ops.Conv3D(2, (2, 2, 2)), convolution, (BOX, OF_BOX)),
}


@distributed(2, backends="mindspore")
def test_functions_of_mindspore_give_values_and_gradients_of_the_unsharded_tensors(world: World) -> None:
    for name, (call, expected, arrays) in CALLS.items():
        check_call(world, name, call, expected, [Tensor(array) for array in arrays])


@distributed(2, backends="mindspore")
def test_functions_with_kernels_in_float32_run_them(world: World) -> None:
    x, w, b = (Tensor(a.astype(np.float32)) for a in (X, W, B))
    call = lambda x, w, b: ops.conv2d(x, w, b, pad_mode="pad", padding=1)
    # Sums of 24 products below 10 in float32, in another order.
    check_call(world, "ops conv2d", call, call, [x, w, b], tolerance=2e-3)
    rows = [Tensor(a.astype(np.float32)) for a in (ROW, OF_ROW)]
    check_call(world, "ops conv1d", ops.conv1d, ops.conv1d, rows, tolerance=2e-3)
