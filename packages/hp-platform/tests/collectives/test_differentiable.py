"""Adjoints: the gradient of the sum over ranks of the ranks' losses, and its gradient again, against a dense model in numpy.

Each collective is linear. Its matrix over the stacked inputs of all ranks is written down; the gradient is the transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hp_platform import collectives, record_collectives
from hp_platform.collectives import differentiable
from hp_platform.testing import World, distributed

Blocks = list[np.ndarray]


def _sum(x: Blocks) -> np.ndarray:
    return np.sum(x, axis=0)


# Name -> (rows per rank of the input, the collective, the same on the list of all ranks' inputs giving all ranks' outputs,
# kinds of launches in backward).
CASES: dict[
    str, tuple[Callable[[int, int], int], Callable[..., Any], Callable[[Blocks], Blocks], dict[str, int]]
] = {
    "all_reduce sum": (
        lambda r, n: 2,
        differentiable.all_reduce,
        lambda x: [_sum(x)] * len(x),
        {"all_reduce": 1},
    ),
    "all_reduce mean": (
        lambda r, n: 2,
        lambda x: differentiable.all_reduce(x, op="mean"),
        lambda x: [_sum(x) / len(x)] * len(x),
        {"all_reduce": 1},
    ),
    "all_gather": (
        lambda r, n: 2,
        differentiable.all_gather,
        lambda x: [np.concatenate(x)] * len(x),
        {"reduce_scatter": 1},
    ),
    "reduce_scatter sum": (
        lambda r, n: 2 * n,
        differentiable.reduce_scatter,
        lambda x: np.split(_sum(x), len(x)),
        {"all_gather": 1},
    ),
    "reduce_scatter mean": (
        lambda r, n: 2 * n,
        lambda x: differentiable.reduce_scatter(x, op="mean"),
        lambda x: np.split(_sum(x) / len(x), len(x)),
        {"all_gather": 1},
    ),
    "all_to_all": (
        lambda r, n: 2 * n,
        differentiable.all_to_all,
        lambda x: [np.concatenate([np.split(b, len(x))[r] for b in x]) for r in range(len(x))],
        {"all_to_all": 1},
    ),
    "broadcast": (
        lambda r, n: 2,
        lambda x: differentiable.broadcast(x, 0),
        lambda x: [x[0]] * len(x),
        {"all_reduce": 1},
    ),
    "scatter": (lambda r, n: n, lambda x: differentiable.scatter(x, 0), lambda x: list(x[0]), {"gather": 1}),
    "gather": (
        lambda r, n: 2,
        lambda x: differentiable.gather(x, 0),
        lambda x: [np.stack(x)] + [np.zeros((len(x), *x[0].shape))] * (len(x) - 1),
        {"scatter": 1},
    ),
}


def _matrix(model: Callable[[Blocks], Blocks], rows: list[int]) -> np.ndarray:
    """Columns: the stacked outputs of all ranks for every unit vector of the stacked inputs."""
    columns = []
    for i in range(3 * sum(rows)):
        unit = np.zeros(3 * sum(rows))
        unit[i] = 1
        blocks = np.split(unit.reshape(-1, 3), np.cumsum(rows)[:-1])
        columns.append(np.concatenate([y.ravel() for y in model(blocks)]))
    return np.stack(columns, axis=1)


def _check(
    world: World, rows: list[int], call: Callable[..., Any], model: Callable[[Blocks], Blocks]
) -> dict[str, int]:
    """Value, gradient, and gradient of a function of the gradient; returns what backward launched."""
    platform = world.platform
    dtype = "float64" if platform.supports("reduce_float64", world.device_type) else "float32"
    rng = np.random.default_rng(0)
    inputs = [rng.integers(-3, 4, (n, 3)).astype(dtype) for n in rows]
    outputs = model(inputs)
    weights = [rng.integers(-3, 4, y.shape).astype(dtype) for y in outputs]
    a, w = _matrix(model, rows), np.concatenate([v.ravel() for v in weights])
    y = a @ np.concatenate([v.ravel() for v in inputs])
    # loss = sum w * y^2, hence gradient 2 A^T (w y); second loss = |gradient|^2, hence 8 A^T (w A A^T (w y))
    first = 2 * a.T @ (w * y)
    second = 8 * a.T @ (w * (a @ (a.T @ (w * y))))
    cut = slice(3 * sum(rows[: world.rank]), 3 * sum(rows[: world.rank + 1]))

    x = platform.tensor(inputs[world.rank], dtype, world.device)
    platform.set_requires_grad_(x, True)
    out = call(x)
    np.testing.assert_allclose(
        platform.to_numpy(platform.detach(out)), outputs[world.rank], rtol=1e-6, atol=1e-15
    )  # a mean of 3: 1/3 - 1/3 is not 0 everywhere
    loss = platform.sum(out * out * platform.tensor(weights[world.rank], dtype, world.device))
    double = platform.supports("double_backward", world.device_type)
    with record_collectives() as record:
        (grad,) = platform.grad([loss], [x], create_graph=double)
    shape = inputs[world.rank].shape
    # Integers up to a few thousand: exact in float64, and in float32.
    np.testing.assert_allclose(
        platform.to_numpy(platform.detach(grad)), first[cut].reshape(shape), rtol=1e-6, atol=1e-14
    )
    if double:
        (again,) = platform.grad([platform.sum(grad * grad)], [x])
        np.testing.assert_allclose(
            platform.to_numpy(again), second[cut].reshape(shape), rtol=1e-6, atol=1e-12
        )
    return record.counts()


@pytest.mark.parametrize("name", CASES)
@distributed(world_size=(1, 3))
def test_gradients_are_the_transpose(world: World, name: str) -> None:
    rows, call, model, launched = CASES[name]
    counts = _check(world, [rows(r, world.size) for r in range(world.size)], call, model)
    assert counts == (launched if world.size > 1 else {})


@distributed(world_size=(1, 3))
def test_gradients_of_an_uneven_gather(world: World) -> None:
    sizes = [(r + 1) % 3 for r in range(world.size)]  # 1, 2, 0
    _check(
        world,
        sizes,
        lambda x: differentiable.all_gather_uneven(x, sizes),
        lambda x: [np.concatenate(x)] * len(x),
    )


@distributed(world_size=3)
def test_gradients_of_an_uneven_exchange(world: World) -> None:
    n = world.size
    sizes = [[(a + 2 * b) % 3 for b in range(n)] for a in range(n)]

    def model(x: Blocks) -> Blocks:
        cut = [np.split(b, np.cumsum(sizes[r])[:-1]) for r, b in enumerate(x)]
        return [np.concatenate([cut[a][b] for a in range(n)]) for b in range(n)]

    _check(
        world,
        [sum(row) for row in sizes],
        lambda x: differentiable.all_to_all(
            x, in_sizes=sizes[world.rank], out_sizes=[row[world.rank] for row in sizes]
        ),
        model,
    )


@distributed(world_size=3)
def test_gradients_of_a_ring_step_go_backwards(world: World) -> None:
    n = world.size
    counts = _check(
        world,
        [2] * n,
        lambda x: differentiable.exchange(x, (world.rank + 1) % n, (world.rank - 1) % n),
        lambda x: [x[(r - 1) % n] for r in range(n)],
    )
    assert counts == {"batch_send_recv": 1}


@distributed(world_size=2)
def test_what_has_no_adjoint_is_refused(world: World) -> None:
    x = world.platform.zeros((4, 3), device=world.device)
    with pytest.raises(
        ValueError, match="max has no linear adjoint; differentiable reductions are sum and mean"
    ):
        differentiable.all_reduce(x, op="max")
    with pytest.raises(ValueError, match=r"scatter needs one row per rank, \(2, ...\); got shape \(4, 3\)"):
        differentiable.scatter(x, 0)
    with pytest.raises(ValueError, match="its own peer in both directions or in none"):
        differentiable.exchange(x, world.rank, 1 - world.rank)
    assert differentiable.exchange(x, world.rank, world.rank) is x


@distributed(world_size=2)
def test_plain_collectives_do_not_carry_gradients(world: World) -> None:
    x = world.platform.full((2,), 1.0, device=world.device)
    world.platform.set_requires_grad_(x, True)
    for result in (collectives.all_reduce(x), collectives.all_gather(x), collectives.broadcast(x, 0)):
        assert not world.platform.requires_grad(result)
