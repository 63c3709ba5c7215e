"""Reductions of every kind over ranks: values and gradients of the unsharded reduction of the ranks' values."""

import math
from typing import Any

import pytest

from hp_dtensor import DTensor, Partial, Replicate, Shard
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

SHAPE = (5, 3)


def _real(world: World) -> str:
    """The widest floating dtype that can be reduced: HCCL has no float64."""
    return "float64" if world.platform.supports("reduce_float64", world.device_type) else "float32"


def _values(world: World) -> list[list[float]]:
    """For each rank its values, with ties between some ranks, and zeros on none, one or several ranks."""
    count = math.prod(SHAPE)
    of_ranks = [[float((i * 7 + r * 5) % 11 + 1) / 4 for i in range(count)] for r in range(world.size)]
    for r in range(world.size):
        of_ranks[r][0] = 1.5  # all tie
        of_ranks[r][1] = of_ranks[0][1]
        of_ranks[r][2] = 0.0 if r == 0 else of_ranks[r][2]
        of_ranks[r][3] = 0.0
        of_ranks[r][4] = -0.5 if r % 2 else 0.75
    return of_ranks


def _reduce(op: str, rows: list[list[float]]) -> list[float]:
    columns = list(zip(*rows, strict=True))
    if op == "prod":
        return [math.prod(column) for column in columns]
    if op in ("max", "min"):
        return [max(column) if op == "max" else min(column) for column in columns]
    return [sum(column) / (len(rows) if op == "avg" else 1) for column in columns]


def _gradient(op: str, rows: list[list[float]], seed: list[float], rank: int) -> list[float]:
    found = []
    for i, column in enumerate(zip(*rows, strict=True)):
        own = column[rank]
        if op == "prod":
            factor = math.prod(column[:rank] + column[rank + 1 :])
        elif op in ("max", "min"):
            best = max(column) if op == "max" else min(column)
            factor = (own == best) / column.count(best)
        else:
            factor = 1 / len(rows) if op == "avg" else 1.0
        found.append(seed[i] * factor)
    return found


LAUNCHES = {
    ("sum", "Replicate()"): ({"all_reduce": 1}, {}),
    ("sum", "Shard(0)"): ({"reduce_scatter": 1}, {"all_gather": 1}),
    ("max", "Replicate()"): ({"all_reduce": 1}, {"all_reduce": 1}),
    ("max", "Shard(0)"): ({"reduce_scatter": 1}, {"all_reduce": 1, "all_gather": 2}),
    ("prod", "Replicate()"): ({"all_reduce": 1}, {"all_gather": 1}),
    ("prod", "Shard(0)"): ({"reduce_scatter": 1}, {"all_gather": 2}),
}


@distributed(world_size=(1, 2, 3, 4))
def test_values_and_gradients_are_those_of_the_reduction(world: World) -> None:
    mesh, p = init_device_mesh(world.device_type, (world.size,)), world.platform
    rows, seed = _values(world), [float(i + 1) for i in range(math.prod(SHAPE))]
    tolerance = 1e-15 if _real(world) == "float64" else 1e-6  # a few roundings of numbers of the order of 1

    def tensor(values: list[float]) -> Any:
        return p.reshape(p.tensor(values, _real(world), world.device), SHAPE)

    for op in ("sum", "avg", "max", "min", "prod"):
        for target in (Replicate(), Shard(0), Shard(1)):
            name = f"{op} to {target}"
            local = p.set_requires_grad_(tensor(rows[world.rank]), True)
            x = DTensor.from_local(local, mesh, [Partial(op)])
            with count_collectives() as forward:
                y = x.redistribute(placements=[target])
            expected = tensor(_reduce(op, rows))
            assert_parity(y.full_tensor(), expected, rtol=tolerance, atol=tolerance, name=name)
            seeded = DTensor.from_local(tensor(seed), mesh, [Replicate()]).redistribute(placements=[target])
            with count_collectives() as backward:
                p.backward([y.to_local()], [seeded.to_local()])
            wanted = tensor(_gradient(op, rows, seed, world.rank))
            assert_parity(
                p.get_grad(local), wanted, rtol=8 * tolerance, atol=tolerance, name=f"gradient, {name}"
            )
            if world.size == 2 and (op, repr(target)) in LAUNCHES:
                counts = LAUNCHES[op, repr(target)]
                forward.assert_counts(**counts[0])
                backward.assert_counts(**counts[1])


@distributed(world_size=(2, 3))
def test_bools_reduce_to_all_and_any(world: World) -> None:
    mesh, p = init_device_mesh(world.device_type, (world.size,)), world.platform
    rows = [[(i + r) % 3 != 0 for i in range(6)] for r in range(world.size)]
    local = p.tensor(rows[world.rank], "bool", world.device)
    for op, reduce in (("all", all), ("any", any)):
        expected = [reduce(column) for column in zip(*rows, strict=True)]
        for target in (Replicate(), Shard(0)):
            y = DTensor.from_local(local, mesh, [Partial(op)]).redistribute(placements=[target])
            assert p.dtype_name(y.dtype) == "bool"
            assert p.to_numpy(y.full_tensor()).tolist() == expected
        again = y.redistribute(placements=[Partial(op)])
        assert p.to_numpy(again.full_tensor()).tolist() == expected


@distributed(world_size=(2, 3, 4))
def test_whole_numbers_are_reduced_exactly(world: World) -> None:
    mesh, p = init_device_mesh(world.device_type, (world.size,)), world.platform
    largest = 2**53 + 1  # no float64 has it
    rows = [
        [largest + 2 * r - i if i % 2 else (i - 7) * (r + 1) for i in range(15)] for r in range(world.size)
    ]
    small = [[(i - 7) * (r + 1) for i in range(15)] for r in range(world.size)]
    for op in ("sum", "max", "min", "prod"):
        values = small if op == "prod" else rows
        local = p.reshape(p.tensor(values[world.rank], "int64", world.device), SHAPE)
        columns = list(zip(*values, strict=True))
        reduce = {"sum": sum, "max": max, "min": min, "prod": math.prod}[op]
        expected = [reduce(column) for column in columns]
        x = DTensor.from_local(local, mesh, [Partial(op)])
        for target in (Replicate(), Shard(0), Shard(1)):
            y = x.redistribute(placements=[target])
            for z in (y, y.redistribute(placements=[Partial(op)])):
                whole = z.full_tensor()
                assert p.dtype_name(whole.dtype) == "int64"
                assert p.to_numpy(whole).reshape(-1).tolist() == expected, (op, target, z.placements)


@distributed(world_size=2)
def test_products_have_second_derivatives(world: World) -> None:
    mesh, p = init_device_mesh(world.device_type, (2,)), world.platform
    values = [[2.0, 0.0, 3.0], [5.0, 7.0, 0.0]]
    local = p.set_requires_grad_(p.tensor(values[world.rank], _real(world), world.device), True)
    for target in (Replicate(), Shard(0)):
        p.set_grad(local, None)
        y = DTensor.from_local(local, mesh, [Partial("prod")]).redistribute(placements=[target])
        square = (y * y).sum().full_tensor()  # (a b)^2
        if not p.supports("double_backward"):
            with pytest.raises(NotImplementedError, match="create_graph=True.*a formula of its own"):
                p.grad([square], [local], create_graph=True)
            continue
        (gradient,) = p.grad([square], [local], create_graph=True)  # 2 a b^2
        other = values[1 - world.rank]
        assert p.to_numpy(gradient).tolist() == [
            2 * a * b * b for a, b in zip(values[world.rank], other, strict=True)
        ]
        p.backward([p.sum(gradient)])
        # The sum over both ranks of 2 a b^2 and 2 b a^2, derived by a: 2 b^2 + 4 a b.
        assert p.to_numpy(p.get_grad(local)).tolist() == [
            2 * b * b + 4 * a * b for a, b in zip(values[world.rank], other, strict=True)
        ]


WRONG = {
    "an average of integers": ("avg", "int64", r"Partial\('avg'\) of int64 would round"),
    "all of numbers": ("all", "float32", r"Partial\('all'\) is of bools, got float32: compare first"),
    "a sum of bools": ("sum", "bool", r"Partial\('sum'\) of bool has no meaning: use Partial\('any'\)"),
}


@pytest.mark.parametrize("case", WRONG)
@distributed(world_size=2)
def test_reductions_that_a_dtype_lacks_are_refused(case: str, world: World) -> None:
    op, dtype, text = WRONG[case]
    mesh, p = init_device_mesh(world.device_type, (2,)), world.platform
    x = DTensor.from_local(p.zeros((4,), dtype, world.device), mesh, [Partial(op)])
    with pytest.raises(ValueError, match=text):
        x.full_tensor()
