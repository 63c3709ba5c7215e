"""parallelize_value_and_grad: values and gradients of the unsharded program, seeds as given."""

import functools
import sys
from pathlib import Path
from typing import Any

from hp_dtensor import Partial, Replicate, Shard, distribute_tensor
from hp_dtensor.value_and_grad import parallelize_value_and_grad
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from layer_programs import make_mesh, tensor, tolerance

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
SENS: tuple[list[float] | None, ...] = (None, [2.0, -0.5], [0, 3], [0.0, 0.0])


def _program(x: Any, w: Any, unused: Any) -> Any:
    y = x @ w
    return y.sum(), y * y


@distributed(world_size=(1, 2, 3))
def test_outputs_count_as_they_are_told(world: World) -> None:
    for sens in SENS:
        _check_seeds(world, sens)


def _check_seeds(world: World, given: list[float] | None) -> None:
    p, mesh = world.platform, make_mesh(world)
    plain = [tensor(world, 5, 4), tensor(world, 4, 3, seed=1), tensor(world, 2, seed=2)]
    a, b = given or (1.0, 0.0)
    # sum(x w) and sum((x w)^2), by hand: both are functions of y = x w.
    y = p.matmul(plain[0], plain[1])
    of_y = y * (2 * b) + a
    expected = [
        p.matmul(of_y, p.transpose(plain[1], 0, 1)),
        p.matmul(p.transpose(plain[0], 0, 1), of_y),
        p.zeros_like(plain[2]),
    ]
    for at_x, at_w in ((R, R), (S0, R), (S1, S0), (R, S1)):
        weights = [
            distribute_tensor(p.set_requires_grad_(p.clone(t), True), mesh, [at])
            for t, at in zip(plain, (at_x, at_w, R), strict=True)
        ]
        run = parallelize_value_and_grad(functools.partial(_program, *weights), weights, given)
        (total, squares), grads = run()
        assert_parity([total, squares], [p.sum(y), y * y], **tolerance(world))
        assert not total.requires_grad
        assert [g.placements for g in grads] == [w.placements for w in weights]
        assert_parity(list(grads), expected, **tolerance(world), name=f"gradients at {at_x}, {at_w}")
        assert all(w.grad is None for w in weights)


@distributed(world_size=2)
def test_a_single_output_counts_one_whatever_its_placement(world: World) -> None:
    p, mesh = world.platform, make_mesh(world)
    for at in (R, S0, P, Partial("avg")):
        x = distribute_tensor(p.set_requires_grad_(tensor(world, 4), True), mesh, [S0])

        def moved(k: float, x: Any = x, at: Any = at) -> Any:
            return (x * k).redistribute(placements=[at])

        value, (gradient,) = parallelize_value_and_grad(moved, [x])(k=3.0)
        assert_parity(value, tensor(world, 4) * 3, **tolerance(world))
        assert_parity(gradient, tensor(world, 4) * 0 + 3, **tolerance(world), name=f"gradient through {at}")


@distributed(world_size=2)
def test_plain_tensors_work_too_and_fn_runs_once(world: World) -> None:
    p = world.platform
    w = p.set_requires_grad_(tensor(world, 4), True)
    calls = []

    def fn(x: Any) -> Any:
        calls.append(1)
        return p.sum(w * x), "aux"

    x = tensor(world, 4, seed=1)
    with p.no_grad():
        (value, aux), (gradient,) = parallelize_value_and_grad(fn, [w])(x)
    assert (aux, calls) == ("aux", [1])
    assert_parity(value, p.sum(p.detach(w) * x), **tolerance(world))
    assert_parity(gradient, x, exact=True)
