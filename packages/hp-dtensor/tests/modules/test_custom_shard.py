"""custom_shard: functions on local tensors give the values and gradients of the unsharded program."""

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_dtensor.sharded_function import custom_shard
from hp_platform import collectives
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from layer_programs import HIDDEN, WIDTH, loss_of, make_mesh, tensor, tolerance

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def _weights(world: World) -> dict[str, Any]:
    shapes = {"x": (5, WIDTH), "up": (HIDDEN, WIDTH), "bias": (HIDDEN,), "down": (WIDTH, HIDDEN)}
    return {name: tensor(world, *shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def _leaves(world: World, mesh: Any = None, placements: Any = None) -> dict[str, Any]:
    p = world.platform
    plain = {name: p.set_requires_grad_(x, True) for name, x in _weights(world).items()}
    if mesh is None:
        return plain
    return {name: distribute_tensor(x, mesh, placements[name]) for name, x in plain.items()}


def _mlp(world: World) -> Any:
    p = world.platform

    def mlp(x: Any, up: Any, bias: Any, down: Any) -> Any:
        assert not hasattr(x, "placements")
        return p.matmul(p.gelu(p.linear(x, up, bias)), p.transpose(down, 0, 1))

    return mlp


def _check(world: World, call: Any, mesh: Any, placements: Any) -> Any:
    p, plain = world.platform, _leaves(world)
    expected = loss_of(_mlp(world)(*plain.values()))
    p.backward([expected])
    leaves = _leaves(world, mesh, placements)
    loss = loss_of(call(*leaves.values()))
    with count_collectives() as backward:
        loss.backward()
    assert_parity(loss, expected, **tolerance(world), name="loss")
    for name, leaf in leaves.items():
        assert leaf.grad.placements == leaf.placements
        assert_parity(leaf.grad, p.get_grad(plain[name]), **tolerance(world), name=f"gradient of {name}")
    return backward


@distributed(world_size=(1, 2, 3))
def test_an_mlp_cut_by_columns_and_rows(world: World) -> None:
    mesh = make_mesh(world)
    call = custom_shard(_mlp(world), mesh, [P], ([R], [S0], [S0], [S1]))
    backward = _check(world, call, mesh, {"x": [R], "up": [S0], "bias": [S0], "down": [S1]})
    backward.assert_counts(all_reduce=int(world.size > 1))  # x


@distributed(world_size=4, backends=("torch", "cuda"))
def test_an_mlp_on_a_grid_with_names_of_mesh_dims(world: World) -> None:
    mesh = make_mesh(world, grid=True)
    call = custom_shard(
        _mlp(world),
        out_placements=[S0, P],
        in_placements=(("dp", "None"), ("tp", "None"), ("tp",), ("None", "tp")),
    )
    at = {"x": [S0, R], "up": [R, S0], "bias": [R, S0], "down": [R, S1]}
    _check(world, call, mesh, at).assert_counts(all_reduce=4)  # x over tp, three weights over dp


@distributed(world_size=(1, 2, 3))
def test_inputs_that_lie_otherwise_are_redistributed_and_sums_scattered(world: World) -> None:
    mesh = make_mesh(world)
    call = custom_shard(_mlp(world), mesh, [P], ([R], [S0], [S0], [S1]))
    backward = _check(world, call, mesh, {"x": [S0], "up": [R], "bias": [R], "down": [S0]})
    # x was gathered for use that differs: one reduce-scatter. up and bias were sliced: gathers. down moved across.
    kinds = backward.counts
    assert sum(n for kind, n in kinds.items() if kind.startswith("reduce_scatter")) == int(world.size > 1)
    assert "all_reduce" not in kinds


@distributed(world_size=4, backends=("torch", "cuda"))
def test_rows_cut_over_both_mesh_dims_are_joined_along_one_where_ranks_use_them_differently(
    world: World,
) -> None:
    """No all-gather alone does that: other ranks' rows come in one exchange, and gradients are summed behind it."""
    mesh = make_mesh(world, grid=True)
    at = {"x": [S0, S0], "up": [S0, R], "bias": [S0, R], "down": [S1, R]}
    call = custom_shard(_mlp(world), mesh, [P, S0], ([R, S0], [S0, R], [S0, R], [S1, R]))
    _check(world, call, mesh, at)


@distributed(world_size=2)
def test_it_decorates_and_keeps_the_functions_name(world: World) -> None:
    mesh = make_mesh(world)

    @custom_shard(out_placements=([S0], None, [R]), in_placements=([S0], None, [R]))
    def scaled(x: Any, factor: float, y: Any, *, shift: float = 0.0) -> Any:
        """Scales."""
        return x * factor + shift, "text", y

    assert (scaled.__name__, scaled.__doc__) == ("scaled", "Scales.")
    x, y = tensor(world, 5, 2), tensor(world, 3)
    result, text, same = scaled(
        distribute_tensor(x, mesh, [R]), 2.0, distribute_tensor(y, mesh, [S0]), shift=1.0
    )
    assert (result.placements, text, same.placements) == ((S0,), "text", (R,))
    assert_parity(result, x * 2.0 + 1.0, **tolerance(world))
    # Without DTensors it is the function itself.
    plain, *_ = scaled(x, 2.0, y)
    assert not hasattr(plain, "placements")


@distributed(world_size=2)
def test_known_shapes_cost_no_communication(world: World) -> None:
    mesh = make_mesh(world)
    x = distribute_tensor(tensor(world, 5, 2), mesh, [S0])
    told = custom_shard(lambda x: x * 2, mesh, [S0], ([S0],), out_shapes=lambda x: x.shape)
    asked = custom_shard(lambda x: x * 2, mesh, [S0], ([S0],))
    with count_collectives() as counted:
        told(x)
    counted.assert_counts()
    with count_collectives() as counted:
        asked(x)
    counted.assert_counts(all_gather=1)


@distributed(world_size=(2, 3))
def test_gradients_that_do_not_lie_as_usual(world: World) -> None:
    mesh, p = make_mesh(world), world.platform
    group = mesh.get_group()

    class Total(p.Function):
        """A sum over ranks inside of the function: its result is Replicate, what comes back to each rank a part."""

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return collectives.all_reduce(p.detach(x), group)

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return g

    def weighted(w: Any) -> Any:
        return Total.apply(w * float(world.rank + 1))

    factor = world.size * (world.size + 1) / 2

    def gradient(grads: Any, out: Any, function: Any) -> Any:
        w = distribute_tensor(p.set_requires_grad_(tensor(world, 3), True), mesh, [R])
        custom_shard(function, mesh, [out], ([R],), in_grad_placements=grads)(w).sum().backward()
        return p.to_numpy(w.grad.to_local()).tolist()

    assert gradient(None, R, weighted) == [world.rank + 1.0] * 3  # not the same on all ranks: has to be told
    assert gradient(([P],), R, weighted) == [factor] * 3
    assert gradient(([P],), P, lambda w: w * 1.0) == [float(world.size)] * 3
    assert gradient(([R],), P, lambda w: w * 1.0) == [1.0] * 3  # the function says that it sums itself


@distributed(world_size=2)
def test_redistribution_may_be_refused(world: World) -> None:
    mesh = make_mesh(world)
    call = custom_shard(lambda x: x * 2, mesh, [S0], ([S0],), redistribute_inputs=False)
    assert call(distribute_tensor(tensor(world, 4), mesh, [S0])).placements == (S0,)
    with pytest.raises(ValueError, match=r"is \(Replicate\(\),\).*but the function wants \(Shard\(0\),\)"):
        call(distribute_tensor(tensor(world, 4), mesh, [R]))


@distributed(world_size=(2, 3))
def test_an_average_as_a_result(world: World) -> None:
    mesh, p = make_mesh(world), world.platform
    w = distribute_tensor(p.set_requires_grad_(tensor(world, 3), True), mesh, [R])
    call = custom_shard(lambda w: w * float(world.rank + 1), mesh, [Partial("avg")], ([R],))
    result = call(w)
    assert isinstance(result, DTensor)
    result.sum().backward()
    mean = (world.size + 1) / 2
    assert_parity(result, tensor(world, 3) * mean, **tolerance(world))
    assert_parity(w.grad, tensor(world, 3) * 0 + mean, **tolerance(world))
