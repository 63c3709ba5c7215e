"""What users of such libraries reported, each as the case that failed, with its neighbours: rows of our list of pitfalls.

Rows 12 and 40 stand in torch_only/test_init and checkpoint/test_killed_saves, rows 17, 18 and 20 in test_redistribute too.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import (
    DTensor,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    async_save,
    distribute_tensor,
    load,
    random,
    save,
)
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def _real(world: World) -> str:
    """The widest floating dtype that can be reduced: HCCL has no float64."""
    return "float64" if world.platform.supports("reduce_float64", world.device_type) else "float32"


def _tolerance(world: World) -> float:
    # Sums of some tens of products of numbers near 1. MindSpore rounds Python floats to float32, but none is used here.
    return 1e-12 if _real(world) == "float64" else 1e-4


def _line(world: World) -> DeviceMesh:
    return init_device_mesh(world.device_type, (world.size,))


def _numbers(world: World, *shape: int, start: int = 0) -> Any:
    p, count = world.platform, 1
    for n in shape:
        count = count * n
    values = [((i * 37 + start * 11) % 23 - 11) / 8 for i in range(count)]
    return p.reshape(p.tensor(values, _real(world), world.device), shape)


def _leaf(world: World, x: Any) -> Any:
    return world.platform.set_requires_grad_(world.platform.clone(x), True)


def _same(world: World, found: Any, expected: Any, name: str) -> None:
    assert_parity(found, expected, rtol=_tolerance(world), atol=_tolerance(world), name=name)


def _compare(
    world: World, function: Callable[..., Any], tensors: list[Any], places: list[Placement], name: str
) -> Any:
    """Value and gradients of ``function`` on DTensors against those on plain tensors; gives the value."""
    mesh, p = _line(world), world.platform
    plain = [_leaf(world, t) for t in tensors]
    placed = [distribute_tensor(_leaf(world, t), mesh, [at]) for t, at in zip(tensors, places, strict=True)]
    expected, found = function(*plain), function(*placed)
    _same(world, found, expected, name)
    p.backward([p.sum(expected * expected)])
    (found * found).sum().backward()
    for i, (mine, t) in enumerate(zip(placed, plain, strict=True)):
        _same(world, mine.grad, p.get_grad(t), f"gradient {i} of {name}")
    return found


# --------------------------------------------------------------------------------------------------------------- row 11
@distributed(world_size=4, backends=("torch", "cuda"))
def test_row_11_few_and_uneven_rows_on_a_grid_load_a_full_state(tmp_path: Path, world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2, 2))
    ways: list[list[Placement]] = [[S0, S0], [StridedShard(0, 2), S0], [R, S0], [S0, R], [S0, S1], [R, R]]
    for rows in (1, 2, 3, 5, 17):
        full = {"w": _numbers(world, rows, 3), "b": _numbers(world, rows, start=1)}
        save(full, tmp_path / str(rows))
        for way in ways:
            at_b = [R if p.is_shard(1) else p for p in way]
            state = {
                name: distribute_tensor(full[name] * 0, mesh, at) for name, at in (("w", way), ("b", at_b))
            }
            load(state, tmp_path / str(rows))
            for name, whole in full.items():
                assert_parity(state[name], whole, exact=True, name=f"{name} of {rows} rows, {way}")
                state[name].fill_(0).copy_(whole)  # as load_state_dict does
                assert_parity(state[name], whole, exact=True, name=f"{name} copied, {rows} rows, {way}")


# --------------------------------------------------------------------------------------------------------- rows 17, 19
@distributed(world_size=(2, 3))
def test_row_17_pieces_of_any_length_agree_on_the_whole_or_are_refused(world: World) -> None:
    p, mesh = world.platform, _line(world)
    for rows in range(2 * world.size + 2):
        x = distribute_tensor(_numbers(world, rows, 2), mesh, [S0])
        assert DTensor.from_local(x.to_local(), mesh, [S0]).shape == (rows, 2)
        assert DTensor.from_local(x.to_local(), mesh, [S0], shape=(rows, 2)).shape == (rows, 2)
    wrong = p.zeros((1 + world.rank, 2), _real(world), world.device)  # a longer piece behind a shorter one
    with pytest.raises(ValueError, match="which are not the chunks of one tensor"):
        DTensor.from_local(wrong, mesh, [S0])


@distributed(world_size=(2, 3))
def test_rows_18_and_19_views_and_products_of_uneven_and_empty_pieces(world: World) -> None:
    p = world.platform
    for rows in (1, 2, 3, 5):
        x, w, v = _numbers(world, rows, 4), _numbers(world, 3, 4, start=1), _numbers(world, 2, rows, start=2)
        for at_x, at_w in itertools.product((S0, S1, R), (S0, S1, R)):
            _compare(world, p.linear, [x, w], [at_x, at_w], f"linear of {rows} rows, {at_x}, {at_w}")
        for at_v, at_x in itertools.product((S0, S1, R), (S0, S1, R)):
            _compare(
                world, lambda a, b: a @ b, [v, x], [at_v, at_x], f"contracted over {rows}, {at_v}, {at_x}"
            )
        for shape in ((-1,), (rows, 2, 2), (2, -1), (1, rows, 4), (4, rows)):
            for at in (S0, S1, R):
                _compare(
                    world, lambda t, s=shape: p.reshape(t, s), [x], [at], f"{(rows, 4)} as {shape}, {at}"
                )


# ------------------------------------------------------------------------------------------------------ rows 20, 21, 22
@distributed(world_size=(2, 3))
def test_row_21_a_mean_over_uneven_pieces_is_weighted(world: World) -> None:
    for rows in (1, 2, 4, 5, 7):
        for at, dim in itertools.product((S0, S1, R), (None, 0, 1)):
            x = _numbers(world, rows, 3)
            _compare(
                world,
                lambda t, d=dim: t.mean() if d is None else t.mean(d),
                [x],
                [at],
                f"{rows} rows, {at}, dim {dim}",
            )


@distributed(world_size=(2, 3))
def test_row_22_only_what_is_linear_works_on_summands(world: World) -> None:
    p, mesh = world.platform, _line(world)
    whole = _numbers(world, 4, 3)
    # Each rank holds a summand of its own, so that a function of summands is no function of the sum.
    summand = whole * float(world.rank + 1) - float(world.rank) * 2
    total = sum(whole * float(r + 1) - float(r) * 2 for r in range(world.size))

    def fresh() -> Any:
        return DTensor.from_local(summand, mesh, [P])

    for name, function in {
        "abs": lambda t: t.abs(), "relu": p.relu, "max": lambda t: t.max(), "square": lambda t: t * t, "exp": lambda t: (t / 8).exp(),
        "plus": lambda t: t + 1, "minus": lambda t: 1 - t, "divided": lambda t: 1 / (t * t + 1), "compare": lambda t: p.cast(t > 0, "int32"),
    }.items():  # fmt: skip
        _same(world, function(fresh()), function(total), name)
    for factor in (-5, 2, -5, 2.0, True):  # one plan, its own value each time
        with count_collectives() as counted:
            y = fresh() * factor
        counted.assert_counts()
        assert y.placements == (P,)
        _same(world, y, total * factor, f"{factor} times")
    for name, linear in (
        ("minus", lambda a, b: a - b),
        ("sum", lambda a, b: (a + b).sum(0)),
        ("turned", lambda a, b: a.transpose(0, 1)),
    ):
        with count_collectives() as counted:
            y = linear(fresh(), fresh())
        counted.assert_counts()
        assert y.placements == (P,), name
        _same(world, y, linear(total, total), name)


# -------------------------------------------------------------------------------------------------------------- row 23
@distributed(world_size=(2, 3))
def test_row_23_plain_constants_stand_beside_sharded_tensors_and_trained_ones_are_named(world: World) -> None:
    p, mesh = world.platform, _line(world)
    whole = _numbers(world, 3, 4)
    cos, sin = _numbers(world, 3, 4, start=1), _numbers(world, 1, 4, start=2)
    for at in (S0, S1, R):
        q = distribute_tensor(_leaf(world, whole), mesh, [at])
        with count_collectives() as counted:
            rotated = q * cos + (-q) * sin + 1
        counted.assert_counts()
        _same(world, rotated, whole * cos + (-whole) * sin + 1, str(at))
        with pytest.raises(
            ValueError,
            match=r"argument 1 of .* is a plain tensor of shape \(3, 4\) that requires grad, beside",
        ):
            q * _leaf(world, cos)
        with pytest.raises(ValueError, match=r"argument 1 of .*: say how it lies, with DTensor.from_local"):
            p.linear(q, _leaf(world, cos))


@distributed(world_size=2)
def test_row_23_an_error_names_the_module_that_was_running(world: World) -> None:
    p, mesh = world.platform, _line(world)
    base: Any = p.Module

    class Inner(base):
        def forward(self, x: Any, other: Any) -> Any:
            return x * other

        construct = forward

    class Outer(base):
        def __init__(self) -> None:
            super().__init__()
            self.layers = p.ModuleList([Inner(), Inner()])

        def forward(self, x: Any, other: Any) -> Any:
            first, second = self.layers
            return second(first(x, 2), other)

        construct = forward

    x = distribute_tensor(_numbers(world, 3, 4), mesh, [S0])
    trained = _leaf(world, _numbers(world, 3, 4))
    _same(world, Outer()(x, x), 2 * _numbers(world, 3, 4) * _numbers(world, 3, 4), "no error")
    for module, other, where in (
        (Outer(), trained, r"; in Outer 'layers\.1' \(Inner\)$"),
        (Inner(), trained, r"; in Inner$"),
        (Outer(), distribute_tensor(_numbers(world, 5), mesh, [R]), r"; in Outer 'layers\.1' \(Inner\)$"),
    ):
        with pytest.raises(ValueError, match=where) as caught:
            module(x, other)
        assert str(caught.value).count("; in ") == 1
    with pytest.raises(ValueError, match="requires grad, beside") as outside:
        x * trained
    assert "; in " not in str(outside.value)


# -------------------------------------------------------------------------------------------------------- rows 24, 25
@distributed(world_size=(1, 2, 3))
def test_rows_24_and_25_draws_and_masks_do_not_depend_on_the_sharding(world: World) -> None:
    p, mesh = world.platform, _line(world)
    whole = p.zeros((5, 3), "float32", world.device)
    draws: dict[str, Callable[[Any], Any]] = {
        "normal_": lambda x: random.normal_(x),
        "kaiming_uniform_": lambda x: random.kaiming_uniform_(x),
        "dropout": lambda x: random.dropout(x + 1, 0.5),
        "two in a row": lambda x: random.dropout(random.uniform_(x), 0.25),
    }
    for name, draw in draws.items():
        random.manual_seed(5)
        expected = p.to_numpy(draw(p.clone(whole)))
        assert len(set(expected.ravel().tolist())) > 1
        for at in (S0, S1, R):
            random.manual_seed(5)
            found = draw(distribute_tensor(whole, mesh, [at]))
            assert (p.to_numpy(found.full_tensor()) == expected).all(), (name, at)


# -------------------------------------------------------------------------------------------------------- rows 38, 39
@distributed(world_size=2)
def test_row_38_what_is_written_after_a_save_in_the_background_is_not_in_the_file(
    tmp_path: Path, world: World
) -> None:
    p, mesh = world.platform, _line(world)
    for i, at in enumerate((S0, S1, R)):
        x = distribute_tensor(p.full((5, 3), 1.0, "float32", world.device), mesh, [at])
        handle = async_save({"w": x}, tmp_path / str(i))
        with p.no_grad():
            x.mul_(7)
        handle.wait()
        assert p.to_numpy(load(tmp_path / str(i))["w"]).tolist() == [[1.0] * 3] * 5
        assert p.to_numpy(x.full_tensor()).tolist() == [[7.0] * 3] * 5


@distributed(world_size=4)
def test_row_39_fewer_rows_than_ranks_load_on_other_numbers_of_ranks(tmp_path: Path, world: World) -> None:
    whole = _numbers(world, 6, 2)
    save({"w": distribute_tensor(whole, _line(world), [S0])}, tmp_path)
    assert_parity(load(tmp_path)["w"], whole, exact=True)
    for size in range(1, world.size + 1):
        mesh = DeviceMesh(world.device_type, list(range(size)))
        for at in (S0, S1, R):
            state = {}
            if world.rank < size:
                state["w"] = distribute_tensor(whole * 0, mesh, [at])
            load(state, tmp_path, strict=False)
            if world.rank < size:
                assert_parity(state["w"], whole, exact=True, name=f"{at} on {size} ranks")


# -------------------------------------------------------------------------------------------------------------- row 44
class Halves(Shard):
    """A user's placement that is a Shard."""


@pytest.mark.once
def test_row_44_kinds_are_asked_by_predicates_that_subclasses_answer() -> None:
    for placement, kind in (
        (Shard(1), "shard"), (StridedShard(1, 2), "shard"), (Halves(1), "shard"), (Replicate(), "replicate"), (Partial("max"), "partial"),
        (RaggedShard((0,), (1, 2)), None),
    ):  # fmt: skip
        answers = {
            "shard": placement.is_shard(), "replicate": placement.is_replicate(), "partial": placement.is_partial(),
        }  # fmt: skip
        assert answers == {name: name == kind for name in answers}, placement
    assert StridedShard(1, 2).is_shard(1) and not StridedShard(1, 2).is_shard(0)
    assert Partial("max").is_partial("max") and not Partial("max").is_partial("sum")
