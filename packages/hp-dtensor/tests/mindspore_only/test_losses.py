"""Losses of MindSpore: what is composed on cpu, the rules with it, and MindSpore's functions on DTensors."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from hp_dtensor._mindspore.composed import losses
from hp_platform.testing import World, distributed

sys.path.extend((str(Path(__file__).parents[1]), str(Path(__file__).parent)))
from rule_cases import Cases, case, check, t, whole_numbers
from spelled import check_call

F = mint.nn.functional
X = np.random.RandomState(0).randn(5, 3)
Y = np.random.RandomState(1).randn(5, 3)
P, Q = 1 / (1 + np.exp(-X)), 1 / (1 + np.exp(-Y))
TARGETS = np.array([2, 0, 1, 1, 0])
WEIGHT = np.array([0.5, 2.0, 1.25])


# ------------------------------------------------------------------------------------------------------- against numpy
def _softplus(x: Any) -> Any:
    return np.logaddexp(x, 0)


def _log_softmax(x: Any) -> Any:
    return x - np.log(np.exp(x).sum(1, keepdims=True))


_CHOSEN = -_log_softmax(X)[np.arange(5), TARGETS]
BY_NUMPY: dict[str, tuple[Callable[[], Any], Any]] = {
    "mse_loss": (lambda: losses.mse_loss(Tensor(X), Tensor(Y)), ((X - Y) ** 2).mean()),
    "l1_loss": (lambda: losses.l1_loss(Tensor(X), Tensor(Y), "none"), np.abs(X - Y)),
    "kl_div": (lambda: losses.kl_div(Tensor(X), Tensor(Q), "sum"), (Q * (np.log(Q) - X)).sum()),
    "kl_div of a target of 0": (lambda: losses.kl_div(Tensor(X), Tensor(Q * 0), "sum"), 0.0),
    "kl_div of a logarithm": (
        lambda: losses.kl_div(Tensor(X), Tensor(Y), "batchmean", True),
        (np.exp(Y) * (Y - X)).sum() / 5,
    ),
    "soft_margin_loss": (lambda: losses.soft_margin_loss(Tensor(X), Tensor(Y)), _softplus(-X * Y).mean()),
    "soft_margin_loss of large numbers": (
        lambda: losses.soft_margin_loss(Tensor(np.array([1e4, -1e4])), Tensor(np.array([1.0, 1.0])), "none"),
        np.array([0.0, 1e4]),
    ),
    "binary_cross_entropy": (
        lambda: losses.binary_cross_entropy(Tensor(P), Tensor(Q), Tensor(WEIGHT)),
        (-(Q * np.log(P) + (1 - Q) * np.log(1 - P)) * WEIGHT).mean(),
    ),
    "binary_cross_entropy_with_logits": (
        lambda: losses.binary_cross_entropy_with_logits(
            Tensor(X), Tensor(Q), pos_weight=Tensor(WEIGHT), reduction="none"
        ),
        Q * WEIGHT * _softplus(-X) + (1 - Q) * _softplus(X),
    ),
    "log_softmax": (lambda: losses.log_softmax(Tensor(X), 1), _log_softmax(X)),
    "cross_entropy": (lambda: losses.cross_entropy(Tensor(X), Tensor(TARGETS)), _CHOSEN.mean()),
    "cross_entropy with weights": (
        lambda: losses.cross_entropy(Tensor(X), Tensor(TARGETS), weight=Tensor(WEIGHT)),
        (_CHOSEN * WEIGHT[TARGETS]).sum() / WEIGHT[TARGETS].sum(),
    ),
    "nll_loss without class 1": (
        lambda: losses.nll_loss(Tensor(_log_softmax(X)), Tensor(TARGETS), ignore_index=1),
        _CHOSEN[TARGETS != 1].mean(),
    ),
}


@pytest.mark.parametrize("name", BY_NUMPY)
@distributed(world_size=1, backends="mindspore")
def test_what_is_composed_gives_the_values_of_numpy(name: str, world: World) -> None:
    compute, expected = BY_NUMPY[name]
    np.testing.assert_allclose(world.platform.to_numpy(compute()), expected, rtol=1e-12, atol=1e-12)


# ----------------------------------------------------------------------------------------------------------- the rules
CASES: Cases = {}
for _reduction in ("mean", "sum", "none"):
    for _name in ("mse_loss", "l1_loss", "soft_margin_loss", "kl_div"):
        # From 0.1 on, so that no two are equal (l1_loss has no gradient there) and logarithms exist.
        _target = t(5, 3, low=0.1, high=1.9)
        case(CASES, _name, getattr(losses, _name), t(5, 3), _target, reduction=_reduction)
    _unit = t(5, 3, low=0.05, high=0.95)
    case(CASES, "binary_cross_entropy", losses.binary_cross_entropy, _unit, _unit, reduction=_reduction)
    _logits = losses.binary_cross_entropy_with_logits
    case(CASES, "binary_cross_entropy_with_logits", _logits, t(5, 3), _unit, reduction=_reduction)
    for _loss, _scores, _shape in (("cross_entropy", (5, 3), (5,)), ("nll_loss", (2, 3, 3), (2, 3))):
        _given = (getattr(losses, _loss), t(*_scores), whole_numbers(*_shape, below=3))
        case(CASES, _loss, *_given, reduction=_reduction)
        case(CASES, _loss, *_given, t(3, low=0.5), reduction=_reduction)
case(CASES, "cross_entropy", losses.cross_entropy, t(3), whole_numbers(below=3))
case(CASES, "nll_loss", losses.nll_loss, t(5, 3), whole_numbers(5, below=3), ignore_index=1)
case(CASES, "softmax", losses.log_softmax, t(5, 3), 1)
case(CASES, "softmax", losses.log_softmax, t(5, 3), 0)


# Sums of up to 24 roundings in float64; Python floats that MindSpore's operators round are not among the arguments.
@pytest.mark.parametrize("name", CASES)
@distributed(world_size=1, backends="mindspore")
def test_loss_gives_values_and_gradients_of_the_unsharded_one(name: str, world: World) -> None:
    check(CASES[name], samples=1, tolerance=1e-8)


# ----------------------------------------------------------------------------------------------- functions of MindSpore
def _smooth(x: Any, y: Any) -> Any:
    # Distances below and above 1.
    return ops.mean(ops.select(mint.abs(x - y) < 1, 0.5 * (x - y) * (x - y), mint.abs(x - y) - 0.5))


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
    "mint mse_loss": (F.mse_loss, losses.mse_loss, (X, Y)),
    "ops mse_loss": (ops.mse_loss, losses.mse_loss, (X, Y)),
    "nn MSELoss": (nn.MSELoss(), losses.mse_loss, (X, Y)),
    "mint l1_loss": (lambda x, y: F.l1_loss(x, y, "sum"), lambda x, y: losses.l1_loss(x, y, "sum"), (X, Y)),
    "ops l1_loss": (ops.l1_loss, losses.l1_loss, (X, Y)),
    "mint smooth_l1_loss": (F.smooth_l1_loss, _smooth, (X, Y)),
    "ops smooth_l1_loss": (lambda x, y: ops.smooth_l1_loss(x, y, 1.0, "mean"), _smooth, (X, Y)),
    "ops huber_loss": (ops.huber_loss, _smooth, (X, Y)),
    "ops soft_margin_loss": (ops.soft_margin_loss, losses.soft_margin_loss, (X, Y)),
    "mint kl_div": (F.kl_div, losses.kl_div, (X, Q)),
    "ops kl_div": (ops.kl_div, losses.kl_div, (X, Q)),
    "mint binary_cross_entropy": (F.binary_cross_entropy, losses.binary_cross_entropy, (P, Q)),
    "mint binary_cross_entropy_with_logits": (
        lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, pos_weight=w),
        lambda x, y, w: losses.binary_cross_entropy_with_logits(x, y, pos_weight=w),
        (X, Q, WEIGHT),
    ),
    "mint cross_entropy": (F.cross_entropy, losses.cross_entropy, (X, TARGETS)),
    "mint cross_entropy with weights": (
        lambda x, y, w: F.cross_entropy(x, y, w),
        lambda x, y, w: losses.cross_entropy(x, y, weight=w),
        (X, TARGETS, WEIGHT),
    ),
    "ops cross_entropy": (ops.cross_entropy, losses.cross_entropy, (X, TARGETS)),
    "ops cross_entropy without class 1": (
        lambda x, y: ops.cross_entropy(x, y, ignore_index=1),
        lambda x, y: losses.cross_entropy(x, y, ignore_index=1),
        (X, TARGETS),
    ),
    "mint nll_loss": (F.nll_loss, losses.nll_loss, (X, TARGETS)),
    "ops nll_loss": (ops.nll_loss, losses.nll_loss, (X, TARGETS)),
    "nn NLLLoss": (nn.NLLLoss(), losses.nll_loss, (X, TARGETS)),
    "nn SoftmaxCrossEntropyWithLogits": (
        nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"),
        losses.cross_entropy,
        (X, TARGETS.astype(np.int32)),
    ),
    "nn SoftmaxCrossEntropyWithLogits of probabilities": (
        nn.SoftmaxCrossEntropyWithLogits(),
        lambda x, q: -(q * losses.log_softmax(x, 1)).sum(1),
        (X, Q),
    ),
    "mint log_softmax": (lambda x: F.log_softmax(x, -1), lambda x: losses.log_softmax(x, 1), (X,)),
    "ops log_softmax": (lambda x: ops.log_softmax(x, 0), lambda x: losses.log_softmax(x, 0), (X,)),
}
ROUNDED = {
    "ops mse_loss",
    "nn MSELoss",
    "ops l1_loss",
    "ops huber_loss",
    "nn SoftmaxCrossEntropyWithLogits of probabilities",
}
"""Where Python code of MindSpore casts float64 to float32 on the way."""


@distributed(2, backends="mindspore")
def test_functions_of_mindspore_give_values_and_gradients_of_the_unsharded_tensors(world: World) -> None:
    for name, (call, expected, arrays) in CALLS.items():
        tolerance = 1e-6 if name in ROUNDED else 1e-8
        check_call(world, name, call, expected, [Tensor(array) for array in arrays], tolerance)
