"""Programs on DTensors against the unsharded program: losses, all gradients, and how many collectives backward starts."""

from collections.abc import Callable
from typing import Any

import pytest

from hp_dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
# Sums of at most 100 products of numbers of the order of 1: a few hundred roundings of 1e-16 at most.
TOLERANCE = 1e-12

Tensors = dict[str, Any]


def _mean_of_squares(x: Any) -> Any:
    return (x * x).mean()


def _mlp(p: Any, t: Tensors) -> Any:
    return _mean_of_squares(p.linear(p.relu(p.linear(t["x"], t["w1"], t["b1"])), t["w2"], t["b2"]))


def _projections(p: Any, t: Tensors) -> Any:
    x = t["x"] * 2
    q, k, v = (p.linear(x, t[name]) for name in ("q", "k", "v"))
    return (q * k + v).sum()


def _sums(p: Any, t: Tensors) -> Any:
    return (p.linear(t["x"], t["w"]) * 3 + t["b"]).sum()


def _tied(p: Any, t: Tensors) -> Any:
    return (t["x"] @ t["w"] @ t["w"].t()).mean()


def _views(p: Any, t: Tensors) -> Any:
    y = (t["x"].reshape((3, 2, 5)).transpose(0, 1) * t["s"]).flatten(1, 2)
    return _mean_of_squares(y @ t["w"])


def _used_twice(p: Any, t: Tensors) -> Any:
    return (t["x"] * t["w"]).sum() + (t["w"] * t["w"]).sum()


def _put_together(p: Any, t: Tensors) -> Any:
    scaled = t["x"] * t["w"]
    return _mean_of_squares(p.cat([scaled, scaled * 2], 1))


# Name -> (program, shapes, placements on a line of ranks, launches of backward on two ranks).
PROGRAMS: dict[
    str, tuple[Callable[[Any, Tensors], Any], dict[str, tuple[tuple[int, ...], Placement]], dict[str, int]]
] = {
    "column and row wise layers": (
        _mlp,
        {"x": ((5, 4), R), "w1": ((6, 4), S0), "b1": ((6,), S0), "w2": ((3, 6), S1), "b2": ((3,), R)},
        {"all_reduce": 1},  # x
    ),
    "batch cut, weights whole": (
        _mlp,
        {"x": ((5, 4), S0), "w1": ((6, 4), R), "b1": ((6,), R), "w2": ((3, 6), R), "b2": ((3,), R)},
        {"all_reduce": 4},  # one per weight
    ),
    "three projections of one activation": (
        _projections,
        {"x": ((5, 4), R), "q": ((6, 4), S0), "k": ((6, 4), S0), "v": ((6, 4), S0)},
        {"all_reduce": 1},
    ),
    "a sum to the end": (_sums, {"x": ((5, 4), S1), "w": ((3, 4), S1), "b": ((3,), R)}, {}),
    "one weight in two places": (
        _tied,
        {"x": ((5, 4), S0), "w": ((4, 3), R)},
        {"all_reduce": 2},
    ),  # w and w.t()
    "views and permutations": (
        _views,
        {"x": ((6, 5), S0), "s": ((2, 3, 1), R), "w": ((15, 2), R)},
        {},  # 3 of 6 rows are no rows of (3, 2, 5): joined before, and alike from there on
    ),
    "used alike and differently": (_used_twice, {"x": ((5, 4), S0), "w": ((4,), R)}, {"all_reduce": 1}),
    "used differently by broadcasting": (
        _used_twice,
        {"x": ((5, 4), S1), "w": ((5, 1), R)},
        {"all_reduce": 1},
    ),
    "put together where ranks hold nothing": (
        _put_together,
        {"x": ((1, 4), S0), "w": ((4,), R)},
        {"all_reduce": 1},
    ),
}


def _real(world: World) -> str:
    """The widest floating dtype that can be reduced: HCCL has no float64."""
    return "float64" if world.platform.supports("reduce_float64", world.device_type) else "float32"


def _tolerance(world: World, of_float64: float) -> float:
    """The same number of roundings, in the dtype of the run."""
    return of_float64 * (1 if _real(world) == "float64" else 2.0**29)


def _make(world: World, shapes: dict[str, tuple[int, ...]]) -> Tensors:
    made = {}
    for place, (name, shape) in enumerate(shapes.items()):
        count = 1
        for n in shape:
            count = count * n
        values = [((i * 37 + place * 11) % 23 - 11) / 8 for i in range(count)]
        made[name] = world.platform.reshape(world.platform.tensor(values, _real(world), world.device), shape)
    return made


def _unsharded(world: World, program: Any, plain: Tensors) -> tuple[Any, dict[str, Any]]:
    p = world.platform
    leaves = {n: p.set_requires_grad_(p.clone(x), True) for n, x in plain.items()}
    loss = program(p, leaves)
    p.backward([loss])
    return loss, {n: p.get_grad(x) for n, x in leaves.items()}


def _check(world: World, mesh: Any, program: Any, plain: Tensors, placements: dict[str, Any]) -> Any:
    """Run the program on DTensors and compare with the plain one; returns the count of backward's collectives."""
    p = world.platform
    expected, expected_grads = _unsharded(world, program, plain)
    leaves = {
        n: distribute_tensor(p.set_requires_grad_(p.clone(x), True), mesh, placements[n])
        for n, x in plain.items()
    }
    loss = program(p, leaves)
    with count_collectives() as counted:
        loss.backward()
    assert_parity(
        loss.full_tensor(),
        expected,
        rtol=_tolerance(world, TOLERANCE),
        atol=_tolerance(world, TOLERANCE),
        name="loss",
    )
    for name, leaf in leaves.items():
        assert leaf.grad is leaf.grad
        assert leaf.grad.placements == leaf.placements
        assert_parity(
            leaf.grad,
            expected_grads[name],
            rtol=_tolerance(world, TOLERANCE),
            atol=_tolerance(world, TOLERANCE),
            name=f"gradient of {name}",
        )
    return counted


@pytest.mark.parametrize("case", PROGRAMS)
@distributed(world_size=(1, 2, 3, 4))
def test_program_on_a_line_of_ranks(case: str, world: World) -> None:
    program, tensors, launches = PROGRAMS[case]
    mesh = init_device_mesh(world.device_type, (world.size,))
    plain = _make(world, {name: shape for name, (shape, _) in tensors.items()})
    counted = _check(world, mesh, program, plain, {name: [p] for name, (_, p) in tensors.items()})
    if world.size == 2:  # which blocks stay blocks in a view depends on their number
        counted.assert_counts(**launches)
    if world.size == 1:
        counted.assert_counts()


@distributed(world_size=4, backends=("torch", "cuda"))
def test_data_and_tensor_parallel_on_a_grid(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    _, tensors, _ = PROGRAMS["column and row wise layers"]
    plain = _make(world, {name: shape for name, (shape, _) in tensors.items()})
    placements = {n: [S0 if n == "x" else R, p] for n, (_, p) in tensors.items()}
    counted = _check(world, mesh, _mlp, plain, placements)
    counted.assert_counts(all_reduce=5)  # x over tp; each of the four weights over dp


@distributed(world_size=4, backends=("torch", "cuda"))
def test_weights_cut_over_both_mesh_dims(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2, 2))
    _, tensors, _ = PROGRAMS["column and row wise layers"]
    plain = _make(world, {name: shape for name, (shape, _) in tensors.items()})
    placements = {n: [S0 if n in ("x", "w1", "w2") else R, p] for n, (_, p) in tensors.items()}
    _check(world, mesh, _mlp, plain, placements)


@distributed(world_size=2)
def test_gradients_gather_over_backwards_and_clear(world: World) -> None:
    mesh, p = init_device_mesh(world.device_type, (2,)), world.platform
    w = distribute_tensor(
        p.set_requires_grad_(p.tensor([1.0, 2.0, 3.0], _real(world), world.device), True), mesh, [R]
    )
    x = distribute_tensor(p.tensor([1.0, 2.0, 3.0], _real(world), world.device), mesh, [S0])
    for times in (1, 2):
        (w * x).sum().backward()
        assert p.to_numpy(w.grad.full_tensor()).tolist() == [times * 1.0, times * 2.0, times * 3.0]
    w.grad = None
    assert w.grad is None
    assert p.get_grad(w.to_local()) is None


@distributed(world_size=2)
def test_to_local_sums_gradients_of_ranks_that_go_on_differently(world: World) -> None:
    mesh, p = init_device_mesh(world.device_type, (2,)), world.platform
    for grad_placements, expected in ((None, world.rank + 1.0), ([Partial()], 3.0)):
        w = distribute_tensor(
            p.set_requires_grad_(p.tensor([1.0], _real(world), world.device), True), mesh, [R]
        )
        local = w.to_local(grad_placements=grad_placements)
        p.backward([p.sum(local * (world.rank + 1.0))])
        assert p.to_numpy(w.grad.to_local()).tolist() == [expected]


@distributed(world_size=2)
def test_backward_from_an_average_and_with_a_given_gradient(world: World) -> None:
    mesh, p = init_device_mesh(world.device_type, (2,)), world.platform
    local = p.set_requires_grad_(p.full((), world.rank + 1.0, _real(world), world.device), True)
    average = DTensor.from_local(local, mesh, [Partial("avg")])
    assert average.item() == 1.5
    average.backward()
    assert p.to_numpy(p.get_grad(local)).tolist() == 0.5
    x = distribute_tensor(
        p.set_requires_grad_(p.tensor([1.0, 2.0, 3.0], _real(world), world.device), True), mesh, [S0]
    )
    (x * 2).backward(p.tensor([1.0, 10.0, 100.0], _real(world), world.device))
    assert p.to_numpy(x.grad.full_tensor()).tolist() == [2.0, 20.0, 200.0]


@distributed(world_size=(2, 3))
def test_second_derivatives_are_those_of_the_unsharded_program(world: World) -> None:
    mesh, p = init_device_mesh(world.device_type, (world.size,)), world.platform
    if not p.supports("double_backward"):
        x = distribute_tensor(_make(world, {"x": (5, 4)})["x"], mesh, [S0])
        leaf = p.set_requires_grad_(x.to_local(), True)
        with pytest.raises(NotImplementedError, match="create_graph=True.*a formula of its own"):
            p.grad([p.sum(leaf * leaf)], [leaf], create_graph=True)
        return
    for x_at, w_at in ((R, S0), (S1, S1), (S0, R), (S0, S0)):
        plain = _make(world, {"x": (5, 4), "w": (3, 4)})

        def penalty(x: Any, w: Any, source: Any, local: Any, wrap: Any) -> Any:
            y = p.linear(x, w)
            cube = local((y * y * y).sum())
            (gradient,) = p.grad([cube], [local(source)], [cube * 0 + 1], create_graph=True)
            return (wrap(gradient) * wrap(gradient)).sum()

        leaves = {n: p.set_requires_grad_(p.clone(t), True) for n, t in plain.items()}
        expected = penalty(leaves["x"], leaves["w"], leaves["x"], lambda t: t, lambda t: t)
        p.backward([expected])
        dx, dw = (
            distribute_tensor(p.set_requires_grad_(p.clone(plain[n]), True), mesh, [at])
            for n, at in (("x", x_at), ("w", w_at))
        )

        def back(gradient: Any, like: Any = dx) -> Any:
            return DTensor.from_local(gradient, mesh, like.placements, shape=like.shape)

        actual = penalty(dx, dw, dx, lambda t: t.to_local(), back)
        actual.backward()
        assert_parity(actual, expected, rtol=_tolerance(world, TOLERANCE), name="penalty")
        assert_parity(
            dw.grad,
            p.get_grad(leaves["w"]),
            rtol=_tolerance(world, TOLERANCE),
            atol=_tolerance(world, 1e-9),
            name=f"w at {w_at}",
        )
        assert_parity(
            dx.grad,
            p.get_grad(leaves["x"]),
            rtol=_tolerance(world, TOLERANCE),
            atol=_tolerance(world, 1e-9),
            name=f"x at {x_at}",
        )


@distributed(world_size=4)
def test_what_a_move_leaves_whole_is_added_up_before_it_and_once_for_all_uses(world: World) -> None:
    """A bias that one rank of a row adds to a sum over the row moves along one mesh dim; ranks of a column differ in samples."""
    platform, mesh = world.platform, init_device_mesh(world.device_type, (world.size // 2, 2))
    dtype = "float64" if platform.supports("float64_compute", world.device) else "float32"
    shapes = {"x": ((6, 4), (S0, S1)), "w": ((3, 4), (R, S1)), "b": ((3,), (R, R))}
    whole, parts = {}, {}
    for number, (name, (shape, placements)) in enumerate(shapes.items()):
        values = platform.arange(0, shape[0] * (shape[1] if len(shape) > 1 else 1), dtype="float32")
        values = platform.cast(platform.reshape(values, shape) / 10 + number, dtype)
        values = platform.to_device(values, world.device)
        whole[name] = platform.set_requires_grad_(values, True)
        parts[name] = distribute_tensor(platform.detach(values), mesh, placements).requires_grad_()

    def loss_of(t: Tensors) -> Any:
        once = platform.linear(t["x"], t["w"], t["b"])
        twice = platform.linear(t["x"] * 2, t["w"], t["b"])
        return _mean_of_squares(once + twice)

    platform.backward([loss_of(whole)])
    loss = loss_of(parts)
    with count_collectives() as counted:
        platform.backward([loss])
    for name, x in parts.items():
        # Sums of at most 24 positive products: some tens of roundings.
        rtol = 1e-13 if dtype == "float64" else 1e-5
        assert_parity(x.grad, platform.get_grad(whole[name]), rtol=rtol, atol=0.0, name=name)
    along_columns = [x for x in counted.record.launches if x.group is mesh.get_group(0)]
    many = mesh.size(0) > 1
    assert [x.kind for x in along_columns] == ["all_reduce"] * 2 * many, "the weight and the bias"
