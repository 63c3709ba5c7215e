"""Rules of image layers, distances, margins and statistics, by torch's own functions: values and gradients, in float64."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import Shard, distribute_tensor
from hp_dtensor.rules import RULES
from hp_platform import init_device_mesh
from hp_platform.testing import World, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parents[1]))
from resized import add_resized
from rule_cases import Cases, Part, case, check, numbers, parts, t, whole_numbers

CASES: Cases = {}
nn = torch._C._nn


def has_gradient_of_tall_trace() -> bool:
    """Whether torch's gradient of the trace of a matrix with more rows than columns is right.

    torch 2.11 fills every (columns + 1)-th element with the gradient and goes on below the square, as if the diagonal came back:
    of ones (5, 1) it gives 1, 0, 1, 0, 1. A cut matrix has the right one there (each rank asks for a square part), a whole
    one torch's own. torch 2.13 stops at the square.
    """
    x = torch.ones((5, 1), requires_grad=True)
    torch.trace(x).backward()
    assert x.grad is not None
    is_right = x.grad.sum().item() == 1
    assert is_right or torch.__version__ < "2.13", "torch has it wrong again"
    return is_right


def trace_of_square(x: torch.Tensor) -> torch.Tensor:
    """The trace, with its gradient also where :func:`has_gradient_of_tall_trace` says that torch's is wrong."""
    return torch.trace(x[: x.shape[1]])


# ---------------------------------------------------------------------------------------------------------------- images
case(CASES, "pixel_shuffle", F.pixel_shuffle, t(2, 12, 2, 3), 2)
case(CASES, "pixel_shuffle", F.pixel_shuffle, t(9, 1, 2), 3)
case(CASES, "pixel_shuffle", F.pixel_shuffle, t(5, 2, 8, 1, 1), 2)
case(CASES, "pixel_shuffle", F.pixel_shuffle, t(4, 4, 8), 2)
case(CASES, "pixel_unshuffle", F.pixel_unshuffle, t(2, 3, 4, 6), 2)
case(CASES, "pixel_unshuffle", F.pixel_unshuffle, t(4, 3, 3), 3)
case(CASES, "pixel_unshuffle", F.pixel_unshuffle, t(1, 8, 8), 2)
case(CASES, "channel_shuffle", F.channel_shuffle, t(3, 6, 5), 3)
case(CASES, "channel_shuffle", F.channel_shuffle, t(2, 4, 3, 2), 2)
case(CASES, "im2col", nn.im2col, t(3, 4, 5, 3), (2, 3), (1, 1), (1, 0), (2, 1))
case(CASES, "im2col", nn.im2col, t(2, 5, 5), (2, 2), (2, 2), (0, 0), (1, 1))
case(CASES, "col2im", nn.col2im, t(2, 8, 6), (4, 3), (2, 2), (1, 1), (0, 0), (1, 1))
case(CASES, "col2im", nn.col2im, t(12, 4), (4, 4), (2, 2), (1, 1), (0, 0), (2, 2))
case(CASES, "grid_sampler", torch.grid_sampler, t(2, 3, 4, 3), t(2, 5, 3, 2, low=-0.9, high=0.9), 0, 0, False)
case(CASES, "grid_sampler", torch.grid_sampler, t(3, 2, 5, 5), t(3, 1, 2, 2, low=-1.3, high=1.3), 0, 1, True)
case(
    CASES,
    "grid_sampler",
    torch.grid_sampler,
    t(1, 2, 2, 3, 3),
    t(1, 2, 3, 2, 3, low=-0.8, high=0.9),
    0,
    0,
    False,
)
case(CASES, "affine_grid_generator", torch.affine_grid_generator, t(5, 2, 3), (5, 3, 2, 4), False)
for n in (1, 8):
    case(CASES, "affine_grid_generator", torch.affine_grid_generator, t(n, 2, 3), (n, 1, 2, 3), False)
case(CASES, "affine_grid_generator", torch.affine_grid_generator, t(2, 3, 4), (2, 1, 2, 3, 2), True)
for n, shape in ((2, (3, 2, 2, 3)), (2, (5, 1, 2)), (3, (2, 3, 1, 2, 2))):
    unpool = getattr(nn, f"max_unpool{n}d")
    more = ((2, 2, 2), (0, 0, 0)) if n == 3 else ()

    def unpooled(x: torch.Tensor, at: torch.Tensor, *rest: Any, unpool: Any = unpool) -> torch.Tensor:
        return unpool(x, at, *rest)

    sizes = (4, 6) if n == 2 else (2, 4, 4)
    case(CASES, f"max_unpool{n}d", unpooled, t(*shape), whole_numbers(*shape, below=24), sizes, *more)

# ------------------------------------------------------------------------------------------------------------- distances
case(CASES, "pairwise_distance", F.pairwise_distance, t(5, 3), t(5, 3, low=-2.0, high=5.0))
case(CASES, "pairwise_distance", F.pairwise_distance, t(2, 5, 3), t(5, 1, low=4.0, high=9.0), 1.0, 1e-6, True)
case(CASES, "pairwise_distance", F.pairwise_distance, t(3), t(3, low=4.0, high=9.0))
case(CASES, "pairwise_distance", F.pairwise_distance, t(5), t(5, low=4.0, high=9.0), 1)
case(CASES, "cdist", torch.cdist, t(5, 3), t(2, 3, low=4.0, high=9.0))
case(CASES, "cdist", torch.cdist, t(2, 3, 2), t(1, 5, 2, low=4.0, high=9.0), 1.0)
case(CASES, "cdist", torch.cdist, t(3, 5), t(2, 5, low=4.0, high=9.0), 1.0)
case(CASES, "cdist", torch.cdist, t(30, 2), t(3, 2, low=4.0, high=9.0))
case(CASES, "cdist", torch._C._VariableFunctions.cdist, t(3, 2), t(3, 2, low=4.0, high=9.0), 2.0, None)
case(CASES, "pdist", torch.pdist, t(5, 3))
for p in (2.0, 1.0, 3.0, float("inf")):
    case(CASES, "dist", torch.dist, t(5, 3), t(3, low=4.0, high=9.0), p)
    case(CASES, "dist", torch.dist, t(2, 5), t(5, low=4.0, high=9.0), p)
case(CASES, "dist", torch.dist, t(), t(1, low=4.0, high=9.0))


# ---------------------------------------------------------------------------------------------------------------- losses
def ctc(scores: torch.Tensor, targets: torch.Tensor, fewer: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.ctc_loss(scores.log_softmax(2), targets % 2 + 1, 5 - fewer, *rest)


for reduction in (0, 1, 2):
    targets = t(5, 3, low=-1.0, high=1.0)
    case(CASES, "margin_ranking_loss", torch.margin_ranking_loss, t(5, 3), t(5, 3), targets, 0.5, reduction)
    case(CASES, "hinge_embedding_loss", torch.hinge_embedding_loss, t(2, 5), t(5), 1.0, reduction)
    case(
        CASES,
        "poisson_nll_loss",
        torch.poisson_nll_loss,
        t(5, 3),
        t(5, 3, low=0.1),
        True,
        True,
        1e-8,
        reduction,
    )
    case(CASES, "cosine_embedding_loss", torch.cosine_embedding_loss, t(5, 3), t(5, 3), t(5), 0.1, reduction)
    case(
        CASES, "triplet_margin_loss", torch.triplet_margin_loss, t(5, 3), t(5, 3), t(5, 3, low=1.0), 1.0, 2.0, 1e-6,
        False, reduction,
    )  # fmt: skip
    case(
        CASES,
        "multi_margin_loss",
        nn.multi_margin_loss,
        t(5, 3),
        whole_numbers(5, below=3),
        1,
        1.0,
        None,
        reduction,
    )
    case(
        CASES,
        "multilabel_margin_loss",
        nn.multilabel_margin_loss,
        t(5, 3),
        whole_numbers(5, 3, below=3),
        reduction,
    )
    case(
        CASES, "ctc_loss", ctc, t(5, 3, 4), whole_numbers(3, 2, below=3), whole_numbers(3, below=2),
        whole_numbers(3, below=3), 0, reduction, True,
    )  # fmt: skip
case(CASES, "margin_ranking_loss", torch.margin_ranking_loss, t(3), t(3), t(3))
case(CASES, "triplet_margin_loss", torch.triplet_margin_loss, t(2, 1, 3), t(1, 5, 3), t(2, 5, 3, low=1.0))
case(CASES, "cosine_embedding_loss", torch.cosine_embedding_loss, t(3), t(3), t())
case(CASES, "multi_margin_loss", nn.multi_margin_loss, t(3), whole_numbers(below=3))
case(CASES, "multilabel_margin_loss", nn.multilabel_margin_loss, t(3), whole_numbers(3, below=3), 1)

# ------------------------------------------------------------------------------------------------- along what lies whole
case(CASES, "prelu", F.prelu, t(2, 5, 3), t(5))
case(CASES, "prelu", F.prelu, t(5, 3), t(1))
case(CASES, "prelu", F.prelu, t(5), t(1))
case(CASES, "glu", nn.glu, t(5, 8), -1)
case(CASES, "glu", nn.glu, t(2, 5, 3), 0)
case(CASES, "diff", torch.diff, t(5, 3))
case(CASES, "diff", torch.diff, t(3, 5), 2, 1)
case(CASES, "diff", torch.diff, t(5, 3), 1, 0, t(2, 3), t(1, 3))
case(CASES, "diff", torch.diff, t(5, 1), 3, 1)
case(CASES, "diff", torch.diff, t(5, 3), 0, 0, t(2, 3))
case(CASES, "diff", torch.diff, t(5, 3), 2, 1, None, t(5, 1))
case(CASES, "trapezoid", torch.trapezoid, t(5, 3), dx=0.5, dim=0)
case(CASES, "trapezoid", torch.trapz, t(5, 3), t(3))
case(CASES, "trapezoid", torch.trapezoid, t(5, 3), t(5, 3))
case(CASES, "cumulative_trapezoid", torch.cumulative_trapezoid, t(2, 5, 3), dim=1)
case(CASES, "cumulative_trapezoid", torch.cumulative_trapezoid, t(5, 3), t(3))
for quantile in (torch.quantile, torch.nanquantile):
    case(CASES, "quantile", quantile, t(5, 3), 0.3)
    case(CASES, "quantile", quantile, t(5, 3), 0.7, 0, True)
    case(CASES, "quantile", quantile, t(2, 5, 3), t(2, low=0.1, high=0.9), 1)
    case(CASES, "quantile", quantile, t(2, 5, 3), t(5, low=0.1, high=0.9), -1, True)
    case(CASES, "quantile", quantile, t(5, 3), t(3, low=0.1, high=0.9), 0, interpolation="higher")
case(CASES, "trace", torch.trace, t(5, 5))
case(CASES, "trace", torch.trace, t(3, 8))
case(CASES, "trace", torch.trace if has_gradient_of_tall_trace() else trace_of_square, t(5, 1))
case(CASES, "renorm", torch.renorm, t(5, 3, 2), 2, 0, 3.0)
case(CASES, "renorm", torch.renorm, t(5, 3), 1.0, -1, 2.0)
case(CASES, "cov", torch.cov, t(3, 5))
case(CASES, "cov", torch.cov, t(1, 5))
case(CASES, "cov", torch.cov, t(5), correction=0)
case(CASES, "cov", torch.cov, t(1, 5))
case(CASES, "corrcoef", torch.corrcoef, t(3, 5))
case(CASES, "put", torch.put, t(5, 3), whole_numbers(2, 3, below=15), t(2, 3), True)
case(CASES, "put", torch.put, t(5, 3), whole_numbers(2, 3, below=15), t(6), True)
case(CASES, "put", torch.put, t(5, 3), whole_numbers(5, below=15), t(5))
case(CASES, "block_diag", torch.block_diag, t(2, 3), t(5, 1), t(3), t())

# ---------------------------------------------------------------------------------------------------------- statistics
for size in ((3, 5, 2), (2, 3), (1, 2, 3, 2), (5, 1)):
    case(CASES, "batch_norm", F.batch_norm, t(*size), None, None, t(size[1]), t(size[1]), True)
case(CASES, "batch_norm", F.batch_norm, t(8, 3), None, None, None, None, True, 0.1, 1e-2)


def with_running(function: Any) -> Any:
    """Running statistics that are no tensors of the call: they have no gradient."""

    def call(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, *rest: Any) -> torch.Tensor:
        return function(x, mean.detach(), var.detach() ** 2 + 0.1, *rest)

    return call


case(CASES, "instance_norm", with_running(F.instance_norm), t(2, 3, 5), t(3), t(3), t(3), t(3), False)

# ------------------------------------------------------------------------------------------------------- parts written
case(CASES, "select_scatter", torch.select_scatter, t(5, 3), t(3), 0, -2)
case(CASES, "select_scatter", torch.select_scatter, t(2, 5, 3), t(2, 5), 2, 1)
case(CASES, "slice_scatter", torch.slice_scatter, t(8, 3), t(3, 3), 0, 1, 7, 2)
case(CASES, "slice_scatter", torch.slice_scatter, t(3, 5), t(3, 2), dim=-1, start=-2)
case(CASES, "slice_scatter", torch.slice_scatter, t(3), t(3))
case(CASES, "slice_scatter", torch.slice_scatter, t(5, 3), t(5, 3), 0, -5)
case(CASES, "diagonal_scatter", torch.diagonal_scatter, t(5, 3), t(3))
case(CASES, "diagonal_scatter", torch.diagonal_scatter, t(3, 2, 5), t(2, 3), -1, 2, 0)

FAMILIES = ("patches", "distance", "margin_loss", "along_whole", "view_scatter", "embedding_bag")

# ------------------------------------------------------------------------------------------------------------------ bags
for mode in ("sum", "mean", "max"):
    case(CASES, "embedding_bag", F.embedding_bag, whole_numbers(5, 2, below=8), t(8, 3), mode=mode)
    case(
        CASES,
        "embedding_bag",
        F.embedding_bag,
        whole_numbers(3, 2, below=5),
        t(5, 2),
        mode=mode,
        padding_idx=1,
    )
case(
    CASES, "embedding_bag", F.embedding_bag, whole_numbers(3, 2, below=5), t(5, 2), None, None, 2.0, False, "sum", False,
    t(3, 2),
)  # fmt: skip
case(CASES, "embedding_bag", F.embedding_bag, whole_numbers(5, 2, below=3), t(3, 2), scale_grad_by_freq=True)


def in_two_bags(ids: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, *rest: Any) -> torch.Tensor:
    return F.embedding_bag(ids, weight, offsets * 0 + torch.tensor([0, 2]), *rest)


case(
    CASES,
    "embedding_bag",
    in_two_bags,
    whole_numbers(5, below=3),
    t(3, 2),
    whole_numbers(2, below=31),
    None,
    2.0,
    False,
    "sum",
)

WRITTEN_ELSEWHERE = {"fill_diagonal_", "as_strided"}
"""In place, and of whole tensors only: test_view_scatter.py."""


def test_every_rule_of_these_families_is_checked() -> None:
    rules = {name for name, rule in RULES.items() if rule.plan.__module__.rpartition(".")[2] in FAMILIES}
    assert rules - WRITTEN_ELSEWHERE <= {entry.rule for entry in CASES.values()}


add_resized(CASES)


@pytest.mark.parametrize("part", parts(CASES, __file__))
@distributed(world_size=1, backends=("torch", "cuda"))
def test_layer_gives_values_and_gradients_of_the_unsharded_one(part: Part, world: World) -> None:
    check(CASES[part.name], part)


UNARY = """
    gammaln psi entr erfcx expit i0e i1 i1e log_ndtr ndtr ndtri airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1
    modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0
    scaled_modified_bessel_k1 spherical_bessel_j0
"""
BINARY = "gammainc gammaincc zeta xlog1py"
POLYNOMIALS = """
    chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h
    hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t
    shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
"""


@distributed(world_size=2, backends="torch")
def test_special_functions_work_element_by_element_where_the_pieces_lie(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    whole = numbers(t(5, 3, low=0.05, high=0.95))
    x = distribute_tensor(whole, mesh, [Shard(0)])
    whole_int = numbers(whole_numbers(5, below=9))
    n = distribute_tensor(whole_int, mesh, [Shard(0)])
    special = torch.special
    with count_collectives() as counted:
        pairs = [(getattr(special, name)(x), getattr(special, name)(whole)) for name in UNARY.split()]
        pairs += [
            (getattr(special, f)(x, x + 1), getattr(special, f)(whole, whole + 1)) for f in BINARY.split()
        ]
        pairs += [(getattr(special, f)(x, 3), getattr(special, f)(whole, 3)) for f in POLYNOMIALS.split()]
        pairs += [
            (torch.polygamma(2, x), torch.polygamma(2, whole)), (x.polygamma(1), whole.polygamma(1)),
            (special.multigammaln(x + 2, 2), special.multigammaln(whole + 2, 2)),
            (torch.mvlgamma(x + 2, 2), torch.mvlgamma(whole + 2, 2)), (n << 1, whole_int << 1), (n >> 1, whole_int >> 1),
            (torch.igamma(x, x), torch.igamma(whole, whole)), (torch.igammac(x, x), torch.igammac(whole, whole)),
            (torch.bitwise_left_shift(n, 2), whole_int << 2), (1 << n, 1 << whole_int),
        ]  # fmt: skip
    counted.assert_counts()
    for found, expected in pairs:
        assert found.placements == (Shard(0),)
        torch.testing.assert_close(found.full_tensor(), expected, rtol=0, atol=0, equal_nan=True)
