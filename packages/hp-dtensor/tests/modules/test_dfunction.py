"""DFunction: forward and backward on local tensors under a rule of the user's, against the same function in one process."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Partial, Replicate, Shard, distribute_tensor
from hp_dtensor.placements import Placement
from hp_dtensor.rules import RULES, Outcome, Result, rule
from hp_dtensor.spec import Spec
from hp_platform import get_platform
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from layer_programs import input_of, loss_of, make, make_mesh, tensor, tolerance

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


if "squares_test" not in RULES:

    @rule("squares_test", params=("input", "factor"))
    def _squares(x: Spec, factor: float) -> Outcome:
        """factor * x * x and its sum: not linear, so sums are reduced first."""
        wanted: tuple[Placement, ...] = tuple(R if p.is_partial() else p for p in x.placements)
        total: tuple[Placement, ...] = tuple(P if p.is_shard() else p for p in wanted)
        return Outcome((wanted,), None, outputs=(Result(wanted, x.shape), Result(total, ())))

    @rule("product_test", params=("input", "other"))
    def _product(x: Spec, w: Spec) -> Outcome:
        """x (..., n) @ w (m, n).T: x whole, the rows of w cut; or the columns of both, to a sum."""
        of_x: list[Placement] = []
        of_w: list[Placement] = []
        out: list[Placement] = []
        last = len(x.shape) - 1
        for px, pw in zip(x.placements, w.placements, strict=True):
            if pw.is_shard(1):
                triple: tuple[Placement, Placement, Placement] = (Shard(last), pw, P)
            elif pw.is_shard(0):
                triple = (R, pw, Shard(last))
            else:
                triple = (px, R, px) if px.is_shard() and not px.is_shard(last) else (R, R, R)
            of_x, of_w, out = [*of_x, triple[0]], [*of_w, triple[1]], [*out, triple[2]]
        return Outcome((tuple(of_x), tuple(of_w)), tuple(out), (*x.shape[:-1], w.shape[0]))

    @rule("total_test", params=("tensors", ("factor", 1.0)))
    def _total(tensors: Any, factor: float = 1.0) -> Outcome:
        """The sum of a list of tensors times a factor; all as the first one lies."""
        at = tensors[0].placements
        return Outcome(((at,) * len(tensors),), at, tensors[0].shape)


@cache
def functions() -> Any:
    """The Functions, which derive from the framework's class."""
    from hp_dtensor.dfunction import DFunction

    p: Any = get_platform()

    class Squares(DFunction):
        _op_name = "squares_test"

        @staticmethod
        def forward(ctx: Any, x: Any, factor: float) -> Any:
            assert not hasattr(x, "placements")
            ctx.save_for_backward(x)
            ctx.factor = factor
            return x * x * factor, p.sum(x * x * factor)

        @staticmethod
        def backward(ctx: Any, g: Any, g_total: Any) -> Any:
            (x,) = ctx.saved_tensors
            return x * (2 * ctx.factor) * (g + g_total), None

    class Product(DFunction):
        _op_name = "product_test"

        @staticmethod
        def forward(ctx: Any, x: Any, w: Any) -> Any:
            ctx.save_for_backward(x, w)
            return p.matmul(x, p.transpose(w, 0, 1))

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            x, w = ctx.saved_tensors
            flat = [p.reshape(t, (-1, t.shape[-1])) for t in (g, x)]
            return p.matmul(g, w), p.matmul(p.transpose(flat[0], 0, 1), flat[1])

    class Total(DFunction):
        _op_name = "total_test"

        @staticmethod
        def forward(ctx: Any, tensors: Any, factor: float = 1.0) -> Any:
            assert not any(hasattr(x, "placements") for x in tensors)
            return sum(tensors[1:], tensors[0]) * factor

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return None, None  # a list's members are constants to the framework's Functions, too

    class Unnamed(DFunction):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g

    class Unknown(Unnamed):
        _op_name = "product_tets"

    class Found:
        pass

    for made in (Squares, Product, Total, Unnamed, Unknown):
        setattr(Found, made.__name__, made)
    return Found


def _two_layers(up: Any, down: Any, x: Any) -> Any:
    """Two products of the user's with one of the framework's operations between."""
    platform: Any = get_platform()
    return functions().Product.apply(platform.gelu(functions().Product.apply(x, up)), w=down)


@distributed(world_size=(1, 2, 3))
def test_layers_made_of_functions_on_a_line_of_ranks(world: World) -> None:
    _check_layers(world, make_mesh(world), [R], [S0], [S1]).assert_counts(all_reduce=int(world.size > 1))


@distributed(world_size=4, backends=("torch", "cuda"))
def test_layers_made_of_functions_on_a_grid(world: World) -> None:
    mesh = make_mesh(world, grid=True)
    _check_layers(world, mesh, [S0, R], [R, S0], [R, S1]).assert_counts(all_reduce=3)


def _check_layers(world: World, mesh: Any, at_x: Any, at_up: Any, at_down: Any) -> Any:
    p, mlp = world.platform, make(world, "MLP")
    plain = [p.set_requires_grad_(p.detach(t), True) for t in (mlp.up.weight, mlp.down.weight)]
    whole = input_of(world)
    expected = loss_of(_two_layers(*plain, whole))
    p.backward([expected])
    leaves = [
        distribute_tensor(t, mesh, at) for t, at in zip([*plain, whole], (at_up, at_down, at_x), strict=True)
    ]
    loss = loss_of(_two_layers(*leaves))
    with count_collectives() as backward:
        loss.backward()
    assert_parity(loss, expected, **tolerance(world), name="loss")
    for name, leaf, source in zip(("up", "down", "x"), leaves, [*plain, whole], strict=True):
        assert_parity(leaf.grad, p.get_grad(source), **tolerance(world), name=f"gradient of {name}")
    return backward


@distributed(world_size=(1, 2, 3))
def test_several_results_each_with_placements_of_its_own(world: World) -> None:
    mesh, p = make_mesh(world), world.platform
    for at in (S0, S1, R, P):
        source = p.set_requires_grad_(tensor(world, 5, 2), at is not P)
        x = distribute_tensor(source, mesh, [at])
        for factor in (2.0, 3.0):  # the second time from the cache
            squares, total = functions().Squares.apply(x, factor=factor)
            assert total.placements == ((P,) if at in (S0, S1) else (R,))
            assert_parity(squares, tensor(world, 5, 2) * tensor(world, 5, 2) * factor, **tolerance(world))
            assert_parity(
                total, p.sum(tensor(world, 5, 2) * tensor(world, 5, 2)) * factor, **tolerance(world)
            )
        if at is not P:
            (squares.sum() + total).backward()
            assert_parity(x.grad, tensor(world, 5, 2) * 12, **tolerance(world), name=f"gradient of {at}")


@distributed(world_size=2)
def test_without_dtensors_it_is_the_ordinary_function(world: World) -> None:
    p = world.platform
    x = p.set_requires_grad_(tensor(world, 5, 2), True)
    squares, total = functions().Squares.apply(x, 2.0)
    assert not hasattr(squares, "placements")
    p.backward([p.sum(squares) + total])
    assert_parity(p.get_grad(x), tensor(world, 5, 2) * 8, **tolerance(world))


@distributed(world_size=2)
def test_a_function_without_a_rule_is_refused(world: World) -> None:
    x = distribute_tensor(tensor(world, 4), make_mesh(world), [S0])
    with pytest.raises(ValueError, match="Unnamed got a DTensor, but has no _op_name"):
        functions().Unnamed.apply(x)
    with pytest.raises(RuntimeError, match="'product_tets' names no rule.*did you mean 'product_test'"):
        functions().Unknown.apply(x)
    with pytest.raises(ValueError, match="Squares.apply: missing a required argument: 'factor'"):
        functions().Squares.apply(x, factro=2.0)


@distributed(world_size=(1, 2, 3))
def test_dtensors_are_found_in_lists_and_by_name(world: World) -> None:
    mesh, plain = make_mesh(world), [tensor(world, 5, 4) * n for n in (1, 2, 3)]
    expected = (plain[0] + plain[1] + plain[2]) * 2.0
    for at in ([S0, S1, R], [R, S0, P], [S1, R, S0]):
        placed = [distribute_tensor(t, mesh, [p]) for t, p in zip(plain, at, strict=True)]
        for call in (
            lambda xs: functions().Total.apply(xs, 2.0),
            lambda xs: functions().Total.apply(tuple(xs), 2.0),
            lambda xs: functions().Total.apply(tensors=xs, factor=2.0),
            lambda xs: functions().Total.apply([xs[0], plain[1], xs[2]], factor=2.0),
        ):
            found = call(placed)
            assert found.placements == (at[0],)
            assert_parity(found, expected, **tolerance(world), name=str(at))
