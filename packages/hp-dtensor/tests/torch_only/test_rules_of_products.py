"""Rules of products, layers and matrix functions, by torch's own functions: values and gradients, in float64."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor.placements import Partial, Placement, Replicate, Shard
from hp_dtensor.rule_checker import check_rule
from hp_dtensor.rules import RULES
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parents[1]))
import rule_cases
from resized import add_resized
from rule_cases import TOLERANCE, Cases, Part, T, check, filled, parts, t, whole_numbers

SAMPLES = 6
"""Of all combinations of placements, per case and mesh, in the default run."""
CASES: Cases = {}


def case(rule: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    rule_cases.case(CASES, rule, function, *args, **kwargs)


case("matmul", torch.mv, t(5, 3), t(3))
case("matmul", torch.vdot, t(5), t(5))
case("matmul", torch.bmm, t(2, 5, 3), t(2, 3, 2))
case("reversed_matmul", lambda b, a: torch.matmul(a, b), t(3, 8), t(5, 3))
case("linear", F.linear, t(2, 5, 3), t(8, 3), t(8))
case("linear", F.linear, t(2, 5, 3), t(3))
case("bilinear", F.bilinear, t(5, 3), t(5, 2), t(2, 3, 2), t(2))
case("bilinear", F.bilinear, t(2, 1, 3), t(2, 1, 5), t(3, 3, 5))
case("outer", torch.outer, t(5), t(3))
case("inner", torch.inner, t(2, 5), t(3, 5))
case("inner", torch.inner, t(5), t(3, 5))
case("tensordot", torch.tensordot, t(2, 3, 5), t(3, 5, 2), 2)
case("tensordot", torch.tensordot, t(2, 3, 5), t(5, 2, 3), ((1, -1), (2, 0)))
case("tensordot", torch.tensordot, t(3), t(2), 0)
case("vecdot", torch.linalg.vecdot, t(2, 5), t(1, 5))
case("vecdot", torch.linalg.vecdot, t(5, 2), t(3, 5, 2), dim=-2)
case("kron", torch.kron, t(2, 3), t(5, 1))
case("kron", torch.kron, t(3), t(2, 2))
case("kron", torch.kron, t(8, 3), t(3, 1))


def cross_along_the_first_dim_of_three(x: Any, y: Any, **dim: int) -> Any:
    """torch.cross without a dim, of which torch says that its meaning will change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cross(x, y, **dim)


case("cross", torch.cross, t(3, 5), t(3, 5), 0)
case("cross", cross_along_the_first_dim_of_three, t(5, 3), t(5, 3))  # pieces of 3 rows
case("linalg_cross", torch.linalg.cross, t(5, 3), t(1, 3))
case("linalg_cross", torch.linalg.cross, t(3, 2), t(3, 2), dim=0)
case("multi_dot", torch.linalg.multi_dot, (t(5, 3), t(3, 2), t(2, 8)))
case("multi_dot", torch.linalg.multi_dot, (t(3), t(3, 5), t(5)))
case("addmm", torch.addmm, t(5, 2), t(5, 3), t(3, 2))
case("addmm", torch.addmm, t(2), t(5, 3), t(3, 2), beta=0.5, alpha=-2.0)
case("addmm", torch.addmm, t(5, 1), t(5, 1), t(1, 2), beta=3)
case("addmv", torch.addmv, t(5), t(5, 3), t(3), alpha=2.0)
case("addr", torch.addr, t(5, 3), t(5), t(3), beta=2.0)
case("baddbmm", torch.baddbmm, t(1, 5, 2), t(2, 5, 3), t(2, 3, 2), beta=0.5)
case("baddbmm", torch.baddbmm, t(2, 5, 2), t(2, 5, 3), t(2, 3, 2))
case(
    "addmm",
    torch.addmm,
    whole_numbers(5, 2, below=9),
    whole_numbers(5, 3, below=9),
    whole_numbers(3, 2, below=9),
    beta=0.5,
)
case("addbmm", torch.addbmm, t(5, 2), t(3, 5, 3), t(3, 3, 2), beta=2.0)
for equation, shapes in {
    "ij,jk->ik": ((5, 3), (3, 2)),
    "ij,jk": ((5, 3), (3, 2)),
    "ba,ca": ((5, 3), (2, 3)),
    "bij,bjk->bik": ((2, 5, 3), (2, 3, 1)),
    "bhqd,bhkd->bhqk": ((2, 3, 2, 5), (2, 3, 1, 5)),
    "ij,jk,kl->il": ((2, 3), (3, 5), (5, 2)),
    "ii->i": ((5, 5),),
    "ii": ((3, 3),),
    "ij->": ((5, 3),),
    "ij->ji": ((5, 3),),
    "...ij,...jk->...ik": ((2, 1, 5, 3), (3, 3, 2)),
    "i...,i...": ((5, 2), (5, 2)),
    "i,j->ij": ((5,), (3,)),
    "a,a,ab->b": ((3,), (3,), (3, 2)),
    "ij,ij->i": ((5, 3), (5, 1)),
    "bii,bi->b": ((2, 3, 3), (2, 3)),
}.items():
    case("einsum", torch.einsum, equation, *[T(shape) for shape in shapes])


# ------------------------------------------------------------------------------------------------------------- attention
sdpa = F.scaled_dot_product_attention


def attention(*args: Any, **kwargs: Any) -> None:
    case("scaled_dot_product_attention", sdpa, *args, **kwargs)


attention(t(2, 3, 5, 4), t(2, 3, 3, 4), t(2, 3, 3, 2))
attention(t(2, 3, 5, 4), t(2, 3, 5, 4), t(2, 3, 5, 4), None, 0.0, True)
attention(t(1, 2, 5, 2), t(1, 2, 3, 2), t(1, 2, 3, 2), None, 0.0, True, scale=0.3)
attention(t(1, 2, 3, 2), t(1, 2, 5, 2), t(1, 2, 5, 2), None, 0.0, True)
attention(t(2, 4, 3, 2), t(2, 2, 3, 2), t(2, 2, 3, 2), None, 0.0, True, enable_gqa=True)
attention(t(2, 6, 3, 2), t(2, 2, 3, 2), t(2, 2, 3, 2), enable_gqa=True)
attention(t(1, 3, 2, 2), t(1, 1, 5, 2), t(1, 1, 5, 2), enable_gqa=True)
attention(t(1, 4, 2, 2), t(1, 2, 5, 2), t(1, 2, 5, 2), t(4, 2, 5), enable_gqa=True)
attention(t(1, 8, 2, 2), t(1, 4, 2, 2), t(1, 4, 2, 2), enable_gqa=True)
attention(t(2, 3, 5, 2), t(2, 3, 3, 2), t(2, 3, 3, 2), t(5, 3))
attention(t(2, 3, 5, 2), t(2, 3, 3, 2), t(2, 3, 3, 2), t(2, 1, 1, 3))
attention(t(5, 2), t(3, 2), t(3, 2))
attention(t(3, 5, 2), t(3, 5, 2), t(3, 5, 2), None, 0.0, True)

# ------------------------------------------------------------------------------------------------------ convolutions, pools
case("conv1d", F.conv1d, t(2, 3, 5), t(5, 3, 2), t(5))
case("conv1d", F.conv1d, t(3, 5), t(2, 3, 2), None, 2, 1)
case("conv1d", F.conv1d, t(2, 4, 5), t(4, 1, 3), t(4), 1, 0, 1, 4)
case("conv1d", F.conv1d, t(2, 4, 5), t(8, 2, 2), t(8), 1, 1, 2, 2)
case("conv1d", F.conv1d, t(1, 2, 5), t(2, 2, 3), t(2), 1, "same")
case("conv1d", F.conv1d, t(2, 4, 5), t(8, 2, 1), t(8), 1, 0, 1, 2)
case("conv1d", F.conv1d, t(2, 2, 5), t(2, 2, 1), None, 2)
case("conv2d", F.conv2d, t(2, 2, 5, 3), t(3, 2, 2, 1), t(3), (2, 1), (1, 0))
case("conv2d", F.conv2d, t(2, 2, 5, 3), t(3, 2, 2, 1), None, 1, "valid")
case("conv3d", F.conv3d, t(1, 2, 3, 2, 3), t(3, 2, 2, 1, 2), t(3))
case("conv_transpose1d", F.conv_transpose1d, t(2, 3, 5), t(3, 5, 2), t(5), 2, 1, 1)
case("conv_transpose1d", F.conv_transpose1d, t(2, 4, 3), t(4, 2, 2), t(8), 1, 0, 0, 4)
case("conv_transpose2d", F.conv_transpose2d, t(2, 2, 3, 3), t(2, 3, 2, 1), t(3), (2, 1), 0, (1, 0), 1, 1)
case("conv_transpose3d", F.conv_transpose3d, t(1, 2, 2, 2, 3), t(2, 3, 2, 1, 2), t(3))
for n, places in ((1, (5,)), (2, (5, 4)), (3, (3, 4, 3))):
    for shape in (t(2, 3, *places), t(5, *places)):
        case(f"avg_pool{n}d", getattr(F, f"avg_pool{n}d"), shape, 2, 2, 1, True)
        case(f"max_pool{n}d", getattr(F, f"max_pool{n}d"), shape, 2, None, 1, 1, True)
        case(f"max_pool{n}d_with_indices", getattr(F, f"max_pool{n}d_with_indices"), shape, 2, 1)
        case(f"adaptive_avg_pool{n}d", getattr(F, f"adaptive_avg_pool{n}d"), shape, 2)
        case(f"adaptive_max_pool{n}d", getattr(F, f"adaptive_max_pool{n}d"), shape, 2)
        case(
            f"adaptive_max_pool{n}d_with_indices", getattr(F, f"adaptive_max_pool{n}d_with_indices"), shape, 2
        )
case("interpolate", F.interpolate, t(2, 3, 5), None, 1.5, "linear")
case("interpolate", F.interpolate, t(2, 3, 4, 3), (5, 2), None, "bilinear")
case("interpolate", F.interpolate, t(1, 2, 3), 7)

# ------------------------------------------------------------------------------------------------------- matrix functions


def regular(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of matrices whose singular values are far apart: what is asked must have one answer."""

    def of_regular(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        m, n = x.shape[-2:]
        weights = torch.arange(1.0, min(m, n) + 1, dtype=x.dtype) * 10
        return function(x * 0.1 + torch.zeros(m, n, dtype=x.dtype).diagonal_scatter(weights), *args, **kwargs)

    return of_regular


def symmetric(function: Callable[..., Any]) -> Callable[..., Any]:
    return regular(lambda x, *args, **kwargs: function(x @ x.mT, *args, **kwargs))


case("same_matrix", regular(torch.linalg.inv), t(2, 3, 3))
case("same_matrix", torch.linalg.matrix_exp, t(3, 2, 2))
case("same_matrix", torch.linalg.matrix_power, t(5, 2, 2), 3)
case("same_matrix", symmetric(torch.linalg.cholesky), t(3, 2, 2))
case("transposed_matrix", regular(torch.linalg.pinv), t(2, 3, 2))
case("number_of_matrix", torch.linalg.det, t(5, 2, 2))
case("number_of_matrix", regular(torch.linalg.matrix_rank), t(2, 3, 2))
case("row_of_matrix", regular(torch.linalg.svdvals), t(3, 2, 3))
case("slogdet", regular(torch.linalg.slogdet), t(2, 3, 3))
case("eigh", symmetric(torch.linalg.eigh), t(3, 2, 2))
case("cholesky_ex", symmetric(torch.linalg.cholesky_ex), t(3, 2, 2))
case("lu_factor", regular(torch.linalg.lu_factor), t(3, 2, 2))
case("lu", regular(torch.linalg.lu), t(2, 3, 2))
case("qr", regular(torch.linalg.qr), t(2, 3, 2))
case("qr", regular(torch.linalg.qr), t(2, 3, 3), "complete")
case("svd", regular(lambda x, full: torch.linalg.svd(x, full_matrices=full)), t(2, 3, 2), False)
case("solve", regular(torch.linalg.solve), t(2, 3, 3), t(2, 3, 5))
case("solve", regular(torch.linalg.solve), t(2, 3, 3), t(1, 3, 5))
case("solve", regular(torch.linalg.solve), t(5, 3, 3), t(5, 3))
case("solve", regular(torch.linalg.solve), t(3, 3), t(3))
case("solve", regular(torch.linalg.solve), t(5, 3, 3), t(3, 3))  # pieces of 3 matrices
case("solve", regular(torch.linalg.solve_triangular), t(3, 3, 3), t(3, 3), upper=True)
case("solve", regular(torch.linalg.solve), t(3, 3), t(5, 3), left=False)
case(
    "cholesky_solve",
    lambda b, x: torch.cholesky_solve(b, torch.linalg.cholesky(x @ x.mT + 30 * torch.eye(2, dtype=x.dtype))),
    t(3, 2, 1),
    t(3, 2, 2),
)

FAMILIES = ("matmul", "einsum", "linalg", "attention", "convolution", "pooling")


def test_every_rule_of_these_families_is_checked() -> None:
    rules = {name for name, rule in RULES.items() if rule.plan.__module__.rpartition(".")[2] in FAMILIES}
    assert rules == {entry.rule for entry in CASES.values()}


add_resized(CASES)


@pytest.mark.parametrize("part", parts(CASES, __file__))
@distributed(world_size=1, backends=("torch", "cuda"))
def test_product_gives_values_and_gradients_of_the_unsharded_one(part: Part, world: World) -> None:
    check(CASES[part.name], part, samples=SAMPLES)


S0, S1, S2, R, P = Shard(0), Shard(1), Shard(2), Replicate(), Partial()
# What runs as it lies, without communication: rule, function, arguments, placements, how the result lies.
KEPT: dict[str, tuple[str, Callable[..., Any], list[Any], list[Placement], Placement]] = {
    "rows of a product": ("matmul", torch.mm, [t(5, 3), t(3, 2)], [S0, R], S0),
    "columns of a product": ("matmul", torch.mm, [t(5, 3), t(3, 2)], [R, S1], S1),
    "summands of a product": ("matmul", torch.mm, [t(5, 3), t(3, 2)], [S1, S0], P),
    "columns of a layer": ("linear", F.linear, [t(5, 3), t(4, 3), t(4)], [R, S0, S0], S1),
    "summands of a layer, its bias whole": ("linear", F.linear, [t(5, 3), t(4, 3), t(4)], [S1, S1, R], P),
    "an average through a layer": (
        "linear",
        F.linear,
        [t(5, 3), t(4, 3)],
        [Partial("avg"), R],
        Partial("avg"),
    ),
    "a sum added to a product": ("addmm", torch.addmm, [t(5, 2), t(5, 3), t(3, 2)], [P, S1, S0], P),
    "heads of an equation": (
        "einsum",
        torch.einsum,
        ["bqhd,bkhd->bhqk", t(1, 2, 3, 2), t(1, 2, 3, 2)],
        [S2, S2],
        S1,
    ),
    "batches of matrices": ("same_matrix", regular(torch.linalg.inv), [t(3, 2, 2)], [S0], S0),
    "batches of attention": ("scaled_dot_product_attention", sdpa, [t(2, 2, 3, 2)] * 3, [S0, S0, S0], S0),
    "heads of attention": ("scaled_dot_product_attention", sdpa, [t(2, 2, 3, 2)] * 3, [S1, S1, S1], S1),
    "queries of attention": (
        "scaled_dot_product_attention",
        sdpa,
        [t(1, 2, 5, 2), t(1, 2, 5, 2), t(1, 2, 5, 2), None, 0.0, True],
        [S2, R, R],
        S2,
    ),
    "values that are a sum": ("scaled_dot_product_attention", sdpa, [t(2, 2, 3, 2)] * 3, [R, R, P], P),
    "channels of a convolution": ("conv1d", F.conv1d, [t(2, 3, 5), t(4, 3, 2), t(4)], [R, S0, S0], S1),
    "groups of a convolution": (
        "conv1d",
        F.conv1d,
        [t(2, 4, 5), t(4, 1, 2), t(4), 1, 0, 1, 4],
        [S1, S0, S0],
        S1,
    ),
    "channels of a pool": ("max_pool2d", F.max_pool2d, [t(2, 3, 4, 4), 2], [S1], S1),
    "a sum through a pool": ("avg_pool2d", F.avg_pool2d, [t(2, 3, 4, 4), 2], [P], P),
}


@pytest.mark.parametrize("name", KEPT)
@distributed(world_size=1, backends="torch")
def test_operation_runs_as_its_tensors_lie(name: str, world: World) -> None:
    rule, function, args, placements, expected = KEPT[name]
    asked = [(placement,) for placement in placements]
    outcome = check_rule(rule, function, filled(args), asked, (2,), tolerance=TOLERANCE)
    wanted = [wish for wish in outcome.inputs if wish is not None]
    # What is whole may become a sum for nothing: one rank keeps it.
    assert all(wish == own or (own, wish) == ((R,), (P,)) for wish, own in zip(wanted, asked, strict=True))
    assert outcome.output == (expected,)


@distributed(world_size=1, backends="torch")
def test_heads_that_do_not_fall_between_groups_are_cut_with_keys_and_values_whole(world: World) -> None:
    heads = filled([t(1, 4, 3, 2), t(1, 1, 3, 2), t(1, 1, 3, 2)])
    asked = [(S1,), (R,), (R,)]
    name = "scaled_dot_product_attention"
    outcome = check_rule(name, sdpa, heads, asked, (2,), kwargs={"enable_gqa": True}, tolerance=TOLERANCE)
    assert (list(outcome.inputs), outcome.output) == (asked, (S1,))
