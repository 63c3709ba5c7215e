"""Reductions, scans, sorting, normalisations and losses of torch, in combinations of placements, against the unsharded ones."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parents[1]))
from resized import add_resized
from rule_cases import Cases, Part, case, check, parts, t, truths, whole_numbers

CASES: Cases = {}


def has_derivative(function: Callable[..., Any]) -> bool:
    """Whether torch can differentiate a function of one tensor that gives several."""
    try:
        sum(function(torch.ones(2, dtype=torch.float64, requires_grad=True))).backward()
    except RuntimeError as error:
        if "derivative for" not in str(error):
            raise
        return False
    return True


def constants(function: Callable[..., Any], *positions: int) -> Callable[..., Any]:
    """The function, of which some tensors have no gradient: by position, or by the name that losses give the third and last."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = [x.detach() if i in positions and x is not None else x for i, x in enumerate(args)]
        return function(
            *given, **{n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in kwargs.items()}
        )

    call.__name__ = function.__name__
    return call


def quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without its warning that another option would be the mean of mathematics."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "reduction: 'mean' divides")
            return function(*args, **kwargs)

    call.__name__ = function.__name__
    return call


for name in ("sum", "mean", "prod", "amax", "amin", "nansum", "nanmean"):
    function = getattr(torch, name)
    case(CASES, name, function, t(5, 3), 0)
    case(CASES, name, function, t(2, 3), -1, True)
    if name != "prod":
        case(CASES, name, function, t(2, 5, 2), (0, 2))
        case(CASES, name, function, t(8, 1), ())
case(CASES, "sum", torch.sum, whole_numbers(5, 2, below=7), 0, dtype=torch.float64)
case(CASES, "sum", torch.sum, truths(5, 2), 0)
case(CASES, "mean", torch.mean, t(5, 3), 0, dtype=torch.float64)
case(CASES, "prod", torch.prod, t(5, low=0.5, high=2.0))
case(CASES, "prod", torch.prod, whole_numbers(3, 2, below=3), 0)
case(CASES, "count_nonzero", torch.count_nonzero, whole_numbers(5, 3, below=3), 0)
case(CASES, "count_nonzero", torch.count_nonzero, truths(2, 3))
for name in ("any", "all"):
    case(CASES, name, getattr(torch, name), truths(5, 3), 0)
    case(CASES, name, getattr(torch, name), truths(1, 8), -1, True)
    case(CASES, name, getattr(torch, name), truths(2, 3))
    case(CASES, name, getattr(torch, name), whole_numbers(5, below=2))
for name in ("max", "min"):
    case(CASES, name, getattr(torch, name), t(5, 3))
    case(CASES, name, getattr(torch, name), t(5, 3), 0)
    case(CASES, name, getattr(torch, name), t(2, 8), -1, True)
    case(CASES, name, getattr(torch, name), t(2, 8), t(1, 8))
    case(CASES, name, getattr(torch, name), whole_numbers(8, below=3), 0)
    case(CASES, "arg" + name, getattr(torch, "arg" + name), t(5, 3), 0)
    case(CASES, "arg" + name, getattr(torch, "arg" + name), t(2, 3, 2), 1, True)
    case(CASES, "arg" + name, getattr(torch, "arg" + name), t(5, 3, 2))
    case(CASES, "arg" + name, getattr(torch, "arg" + name), whole_numbers(3, 5, below=2))


# Not every torch knows its derivative.
aminmax = torch.aminmax if has_derivative(torch.aminmax) else constants(torch.aminmax, 0)
case(CASES, "aminmax", aminmax, t(5, 3))
case(CASES, "aminmax", aminmax, t(5, 3), dim=0)
case(CASES, "aminmax", aminmax, t(1, 8), dim=-1, keepdim=True)

for name in ("var", "std", "var_mean", "std_mean"):
    function = getattr(torch, name)
    case(CASES, name, function, t(5, 3), 0)
    case(CASES, name, function, t(5, 3), correction=0)
    case(CASES, name, function, t(2, 3, 2), (0, 2), False, True)
    case(CASES, name, function, t(2, 8), 1, correction=0.5, keepdim=True)

for order in (2, 1, 0, 3, 2.5, float("inf"), -float("inf")):
    case(CASES, "vector_norm", torch.linalg.vector_norm, t(5, 3), order, 0)
    case(CASES, "vector_norm", torch.linalg.vector_norm, t(2, 3), order, keepdim=True)
    case(CASES, "norm", torch.norm, t(2, 3), order, 1)
case(CASES, "norm", torch.norm, t(5, 3))
case(CASES, "norm", torch.norm, t(5, 3), "nuc")
case(CASES, "norm", torch.Tensor.norm, t(5, 3), p=1, dim=(0, 1), keepdim=True)
case(CASES, "linalg_norm", torch.linalg.norm, t(5, 3))
case(CASES, "linalg_norm", torch.linalg.norm, t(5, 3), 1)
case(CASES, "linalg_norm", torch.linalg.norm, t(5, 3), 1, 0)
case(CASES, "linalg_norm", torch.linalg.norm, t(2, 5, 3), "fro", (0, 2))
for order in ("fro", "nuc", float("inf")):
    case(CASES, "matrix_norm", torch.linalg.matrix_norm, t(2, 5, 3), order)
case(CASES, "matrix_norm", torch.linalg.matrix_norm, t(3, 5), ord=2, keepdim=True)

case(CASES, "logsumexp", torch.logsumexp, t(5, 3), 0)
case(CASES, "logsumexp", torch.logsumexp, t(2, 3, 2), (0, 1), True)
for name in ("softmax", "log_softmax", "softmin"):
    case(CASES, "softmax", getattr(F, name), t(5, 3), 0)
    case(CASES, "softmax", getattr(F, name), t(2, 3, 1), dim=-1)

case(CASES, "cumsum", torch.cumsum, t(5, 3), 0)
case(CASES, "cumsum", torch.cumsum, t(5, 3), -1, dtype=torch.float64)
for name in ("cumprod", "logcumsumexp"):
    case(CASES, "cumulative", getattr(torch, name), t(5, 3), 0)
for name in ("cummax", "cummin"):
    case(CASES, "cumulative_extreme", getattr(torch, name), t(5, 3), 0)
case(CASES, "topk", torch.topk, t(5, 3), 2, 0)
case(CASES, "topk", torch.topk, t(2, 8), 3, largest=False)
case(CASES, "topk", torch.topk, t(31), 1, largest=False)
case(CASES, "sort", torch.sort, t(5, 3), 0)
case(CASES, "sort", torch.sort, t(2, 8), descending=True, stable=True)
case(CASES, "argsort", torch.argsort, t(5, 3), 0, True)
case(CASES, "msort", torch.msort, t(5, 3))
case(CASES, "kthvalue", torch.kthvalue, t(5, 3), 2, 0)
case(CASES, "order_statistic", torch.mode, whole_numbers(5, 3, below=2), 0)
case(CASES, "median", torch.median, t(5, 3))
case(CASES, "median", torch.median, t(5, 3), 0, True)
case(CASES, "median", torch.nanmedian, t(2, 3), -1)

case(CASES, "layer_norm", F.layer_norm, t(2, 5, 3), (3,), t(3), t(3))
case(CASES, "layer_norm", F.layer_norm, t(2, 5, 3), (5, 3))
case(CASES, "rms_norm", F.rms_norm, t(5, 3), (3,), t(3))
case(CASES, "rms_norm", F.rms_norm, t(2, 8), (8,), eps=1e-3)
case(CASES, "group_norm", F.group_norm, t(3, 8, 2), 4, t(8), t(8))
case(CASES, "group_norm", F.group_norm, t(2, 6), 3, weight=None, eps=1e-3)
case(
    CASES, "batch_norm", constants(F.batch_norm, 1, 2), t(3, 5, 2), t(5), t(5, low=0.5, high=2.0), t(5), t(5)
)
case(CASES, "instance_norm", F.instance_norm, t(2, 3, 5), None, None, t(3), t(3))
case(CASES, "normalize", F.normalize, t(5, 3))
case(CASES, "normalize", F.normalize, t(2, 3), 1.0, dim=0)
case(CASES, "cosine_similarity", F.cosine_similarity, t(5, 3), t(5, 3))
case(CASES, "cosine_similarity", F.cosine_similarity, t(2, 5, 3), t(5, 3), 0)

for reduction in ("none", "sum", "mean"):
    cross_entropy = constants(F.cross_entropy, 2)
    case(CASES, "kl_div", quiet(F.kl_div), t(5, 3), t(5, 3), reduction=reduction)
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        case(CASES, name, getattr(F, name), t(5, 3), t(5, 3), reduction=reduction)
    case(CASES, "soft_margin_loss", constants(F.soft_margin_loss, 1), t(5, 3), t(5, 3), reduction=reduction)
    case(CASES, "smooth_l1_loss", F.smooth_l1_loss, t(8), t(8), reduction=reduction, beta=2.0)
    unit = {"low": 0.05, "high": 0.95}
    name = "binary_cross_entropy"
    function = constants(F.binary_cross_entropy, 2)
    case(CASES, name, function, t(5, 2, **unit), t(5, 2, **unit), t(2), reduction=reduction)
    name = "binary_cross_entropy_with_logits"
    function = constants(F.binary_cross_entropy_with_logits, 2, 6)
    case(CASES, name, function, t(5, 3), t(5, 3, **unit), reduction=reduction)
    case(CASES, name, function, t(3), t(3, **unit), t(3), None, None, reduction, t(3, **unit))
    for options in ({}, {"label_smoothing": 0.25}, {"ignore_index": 1}):
        options = {"reduction": reduction, **options}
        case(CASES, "cross_entropy", F.cross_entropy, t(8, 3), whole_numbers(8, below=3), **options)
        case(
            CASES,
            "cross_entropy",
            cross_entropy,
            t(5, 3, 2),
            whole_numbers(5, 2, below=3),
            t(3, **unit),
            **options,
        )
    case(CASES, "cross_entropy", cross_entropy, t(5, 3), t(5, 3, **unit), t(3, **unit), reduction=reduction)
    case(CASES, "cross_entropy", F.cross_entropy, t(3), whole_numbers(below=3), reduction=reduction)
    case(
        CASES,
        "nll_loss",
        constants(F.nll_loss, 2),
        t(5, 3),
        whole_numbers(5, below=3),
        t(3, **unit),
        reduction=reduction,
    )
    case(
        CASES,
        "nll_loss",
        F.nll_loss,
        t(2, 3, 5),
        whole_numbers(2, 5, below=3),
        ignore_index=2,
        reduction=reduction,
    )
case(CASES, "kl_div", F.kl_div, t(5, 3), t(5, 3), reduction="batchmean", log_target=True)


add_resized(CASES)


@pytest.mark.parametrize("part", parts(CASES, __file__))
@distributed(world_size=1, backends=("torch", "cuda"))
def test_operation_gives_values_and_gradients_of_the_unsharded_one(part: Part, world: World) -> None:
    check(CASES[part.name], part)
