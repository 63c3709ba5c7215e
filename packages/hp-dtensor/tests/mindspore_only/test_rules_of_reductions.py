"""Reductions, scans and sorting by the methods of MindSpore's tensors, in combinations of placements."""

import sys
from pathlib import Path

import pytest
from mindspore import Tensor

from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parents[1]))
from rule_cases import Cases, Part, case, check, parts, t, truths

CASES: Cases = {}
for name in ("sum", "mean", "prod", "amax", "amin", "nansum", "argmax", "argmin"):
    case(CASES, name, getattr(Tensor, name), t(5, 3))
    case(CASES, name, getattr(Tensor, name), t(5, 3), 0)
for name in ("max", "min", "var", "std"):
    case(CASES, f"{name}_by_axis", getattr(Tensor, name), t(5, 3))
    case(CASES, f"{name}_by_axis", getattr(Tensor, name), t(5, 3), 0)
    case(CASES, f"{name}_by_axis", getattr(Tensor, name), t(5, 3), axis=0, keepdims=True)
case(CASES, "aminmax_by_axis", Tensor.aminmax, t(5, 3))
for name in ("any", "all"):
    case(CASES, name, getattr(Tensor, name), truths(5, 3))
    case(CASES, name, getattr(Tensor, name), truths(5, 3), 0)
case(CASES, "linalg_norm", Tensor.norm, t(5, 3))
case(CASES, "count_nonzero", Tensor.count_nonzero, t(5, 3))
case(CASES, "logsumexp", Tensor.logsumexp, t(5, 3), 0)
case(CASES, "softmax", Tensor.softmax, t(5, 3), 0)
case(CASES, "softmax", Tensor.softmax, t(5, 3), axis=1)
case(CASES, "cumsum", Tensor.cumsum, t(5, 3), 0)
# Without an exact 0, where MindSpore's own gradient is NaN; see test_functions_of_reductions for zeros.
case(CASES, "cumulative", Tensor.cumprod, t(5, 3, high=3.5), 0)
case(CASES, "cumulative", Tensor.logcumsumexp, t(5, 3), 0)
case(CASES, "sort", Tensor.sort, t(5, 3))
case(CASES, "argsort", Tensor.argsort, t(5, 3))
case(CASES, "topk", Tensor.topk, t(5, 3), 2, 0)
case(CASES, "order_statistic", Tensor.median, t(5, 3))


# Powers and divisions of the methods go by way of float32 constants in places.
@pytest.mark.parametrize("part", parts(CASES, __file__))
@distributed(world_size=1, backends="mindspore")
def test_method_gives_values_and_gradients_of_the_unsharded_one(part: Part, world: World) -> None:
    check(CASES[part.name], part, samples=2, tolerance=1e-8)
