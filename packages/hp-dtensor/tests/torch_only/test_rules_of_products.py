"""Rules of matrix products, by torch's own functions, in combinations of placements: values and gradients, in float64."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hp_dtensor.placements import Partial, Replicate, Shard
from hp_dtensor.rule_checker import check_rule
from hp_platform.testing import World, distributed

MESHES = [(2,), (3,), (2, 2)]
# Sums of at most 60 products of numbers below 4, over at most 4 ranks: 1e-10 is 1e3 times their rounding.
TOLERANCE = 1e-10
SAMPLES = 16
"""Of all combinations of placements, per case and mesh."""


@dataclass(frozen=True)
class T:
    """Stands for a tensor of this shape."""

    shape: tuple[int, ...]


def t(*shape: int) -> T:
    return T(shape)


Case = tuple[str, Callable[..., Any], list[Any], dict[str, Any]]
CASES: dict[str, Case] = {}


def case(rule: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    shown = " ".join(str(a.shape) if isinstance(a, T) else str(a) for a in args)
    CASES[f"{rule} {shown} {kwargs or ''}".strip()] = (rule, function, list(args), kwargs)


case("matmul", torch.mv, t(5, 3), t(3))
case("matmul", torch.vdot, t(5), t(5))
case("matmul", torch.bmm, t(2, 5, 3), t(2, 3, 2))
case("reversed_matmul", lambda b, a: torch.matmul(a, b), t(3, 8), t(5, 3))
case("linear", torch.nn.functional.linear, t(2, 5, 3), t(8, 3), t(8))
case("bilinear", torch.nn.functional.bilinear, t(5, 3), t(5, 2), t(2, 3, 2), t(2))
case("bilinear", torch.nn.functional.bilinear, t(2, 1, 3), t(2, 1, 5), t(3, 3, 5))
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
case("cross", torch.cross, t(3, 5), t(3, 5), 0)
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


def _numbers(shape: tuple[int, ...], start: int) -> torch.Tensor:
    """Different numbers from -3.5 to 4, none of them 0."""
    count = int(torch.Size(shape).numel())
    values = [((i * 7 + start * 3) % 15 - 7) / 2 or 4.0 for i in range(count)]
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


def _filled(args: Sequence[Any]) -> tuple[list[Any], list[tuple[int, ...]]]:
    shapes: list[tuple[int, ...]] = []

    def fill(x: Any) -> Any:
        if isinstance(x, T):
            shapes.append(x.shape)
            return _numbers(x.shape, len(shapes))
        return tuple(map(fill, x)) if isinstance(x, tuple) else x

    return [fill(x) for x in args], shapes


def _sample(shapes: Sequence[tuple[int, ...]], mesh: tuple[int, ...], count: int | None) -> list[Any]:
    """Different combinations, drawn alike each time; None: all."""
    per_tensor = [
        list(
            itertools.product(
                [*map(Shard, range(len(s))), Replicate(), Partial(), Partial("avg")], repeat=len(mesh)
            )
        )
        for s in shapes
    ]
    total = 1
    for options in per_tensor:
        total = total * len(options)
    if count is None or total <= count:
        return list(itertools.product(*per_tensor))
    draw = random.Random(0)
    return [[draw.choice(options) for options in per_tensor] for _ in range(count)]


@pytest.mark.parametrize("name", CASES)
@distributed(world_size=1, backends=("torch", "cuda"))
def test_product_gives_values_and_gradients_of_the_unsharded_one(name: str, world: World) -> None:
    rule, function, args, kwargs = CASES[name]
    filled, shapes = _filled(args)
    for mesh in MESHES:
        for placements in _sample(shapes, mesh, SAMPLES):
            check_rule(rule, function, filled, placements, mesh, kwargs=kwargs, tolerance=TOLERANCE)
