"""Gathered tensors that ranks use alike and differently: launches of the textbook, exact gradients, hooks that see all."""

from typing import Any

import pytest

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def _real(world: World) -> str:
    """The widest floating dtype that can be reduced: HCCL has no float64."""
    return "float64" if world.platform.supports("reduce_float64", world.device_type) else "float32"


def _make(world: World, shape: tuple[int, int], start: int = 0) -> Any:
    p = world.platform
    values = [((i * 37 + start * 11) % 23 - 11) / 8 for i in range(shape[0] * shape[1])]
    return p.reshape(p.tensor(values, _real(world), world.device), shape)


def _leaf(world: World, mesh: Any, x: Any, placements: Any) -> Any:
    return distribute_tensor(
        world.platform.set_requires_grad_(world.platform.clone(x), True), mesh, placements
    )


def _as_it_is(x: Any) -> Any:
    return x


def _check(world: World, leaves: dict[str, Any], plain: dict[str, Any], loss: Any) -> None:
    """Gradients against those of the unsharded program ``loss``."""
    p = world.platform
    whole = {n: p.set_requires_grad_(p.clone(x), True) for n, x in plain.items()}
    p.backward([loss(whole)])
    # Sums of a few products of numbers of the order of 1.
    tolerance = 1e-12 if _real(world) == "float64" else 1e-3
    for name, leaf in leaves.items():
        wanted = p.get_grad(whole[name])
        assert_parity(leaf.grad, wanted, rtol=tolerance, atol=tolerance, name=name)


@distributed(world_size=(2, 3))
def test_a_sequence_parallel_block_costs_the_launches_of_the_textbook(world: World) -> None:
    mesh, p = init_device_mesh(world.device_type, (world.size,)), world.platform
    plain = {"x": _make(world, (5, 4)), "w1": _make(world, (6, 4), 1), "w2": _make(world, (4, 6), 2)}
    at = {"x": S0, "w1": S0, "w2": S1}
    leaves = {n: _leaf(world, mesh, x, [at[n]]) for n, x in plain.items()}

    def block(t: Any, gather: Any, scatter: Any) -> Any:
        y = gather(t["x"] * 2)
        y = p.linear(p.relu(p.linear(y, t["w1"])) * p.linear(y, t["w1"]), t["w2"])
        return scatter(y)

    with count_collectives() as forward:
        y = block(
            leaves,
            lambda x: x.redistribute(placements=[R]),
            lambda y: y.redistribute(placements=[S0]),
        )
        loss = (y * y).sum()
    forward.assert_counts(all_gather=1, reduce_scatter=1)
    with count_collectives() as backward:
        loss.backward()
    backward.assert_counts(all_gather=1, reduce_scatter=1)

    def whole(t: Any) -> Any:
        y = block(t, lambda x: x, lambda y: y)
        return p.sum(y * y)

    _check(world, leaves, plain, whole)


@distributed(world_size=(2, 3))
def test_uses_alike_slice_and_uses_that_differ_scatter_and_both_add_up(world: World) -> None:
    mesh, p = init_device_mesh(world.device_type, (world.size,)), world.platform
    plain = {"x": _make(world, (5, 4)), "w": _make(world, (6, 4), 1)}
    for uses, launches in (
        (("alike",), {}),
        (("differently",), {"reduce_scatter": 1}),
        (("alike", "differently"), {"reduce_scatter": 1}),
        (("differently", "alike", "differently"), {"reduce_scatter": 1}),
    ):
        leaves = {n: _leaf(world, mesh, x, [S0]) for n, x in plain.items()}

        def loss(t: Any, gather: Any, uses: Any = uses) -> Any:
            y = gather(t["x"] * 3)
            total: Any = 0
            for use in uses:
                part = y * y if use == "alike" else p.linear(y, t["w"])
                total = total + (part * part).sum()
            return total

        value = loss(leaves, lambda x: x.redistribute(placements=[R]))
        with count_collectives() as backward:
            value.backward()
        backward.assert_counts(**launches)
        used = leaves if "differently" in uses else {"x": leaves["x"]}
        _check(world, used, plain, lambda t, loss=loss: loss(t, _as_it_is))


@distributed(world_size=4, backends=("torch", "cuda"))
def test_a_tensor_gathered_along_two_mesh_dims_may_differ_along_one_or_both(world: World) -> None:
    mesh, p = init_device_mesh(world.device_type, (2, 2)), world.platform
    plain = {"x": _make(world, (5, 4)), "w": _make(world, (6, 4), 1)}
    for w_at, launches in (
        (
            [S0, R],
            {"reduce_scatter": 1, "all_reduce": 1},
        ),  # x; and the gradient of w along the other mesh dim
        ([R, S0], {"reduce_scatter": 1, "all_reduce": 1}),
        ([S0, S0], {"reduce_scatter": 2}),
    ):
        leaves = {"x": _leaf(world, mesh, plain["x"], [S0, S0]), "w": _leaf(world, mesh, plain["w"], w_at)}
        y = (leaves["x"] * 3).redistribute(placements=[R, R])
        value = (p.linear(y, leaves["w"]) * y.sum()).sum()
        with count_collectives() as backward:
            value.backward()
        assert {k: n for k, n in backward.counts.items() if k in launches} == launches
        _check(world, leaves, plain, lambda t: p.sum(p.linear(t["x"] * 3, t["w"]) * p.sum(t["x"] * 3)))


@distributed(world_size=2)
def test_a_hook_sees_the_whole_gradient_or_is_refused(world: World) -> None:
    mesh, p = init_device_mesh(world.device_type, (2,)), world.platform
    plain = {"x": _make(world, (5, 4)), "w": _make(world, (6, 4), 1)}

    def loss(t: Any, y: Any) -> Any:
        return (p.linear(y, t["w"]) * p.linear(y, t["w"])).sum()

    leaves = {n: _leaf(world, mesh, x, [S0]) for n, x in plain.items()}
    y = (leaves["x"] * 3).redistribute(placements=[R])
    seen: list[Any] = []
    y.register_hook(seen.append)
    value = loss(leaves, y)
    with count_collectives() as backward:
        value.backward()
    backward.assert_counts(
        all_reduce=1
    )  # the whole gradient passes the gathered tensor, and is sliced behind it
    _check(world, leaves, plain, lambda t: loss(t, t["x"] * 3))
    grad = leaves["x"].grad.full_tensor()
    assert_parity(seen[0].full_tensor() * 3, grad, rtol=1e-6, atol=1e-6, name="what the hook saw")

    y = (leaves["x"] * 3).redistribute(placements=[R])
    loss(leaves, y)
    with pytest.raises(
        RuntimeError, match="register_hook of a tensor that redistribute.. has gathered was asked for after"
    ):
        y.register_hook(seen.append)


@distributed(world_size=2)
def test_a_gathered_tensor_that_was_written_since_is_reduced_as_any_other(world: World) -> None:
    mesh, p = init_device_mesh(world.device_type, (2,)), world.platform
    if not p.supports("version_counter"):
        pytest.skip(f"{p.platform_type.value} does not count writes, and refuses to write what requires grad")
    plain = {"x": _make(world, (5, 4)), "w": _make(world, (6, 4), 1)}
    leaves = {n: _leaf(world, mesh, x, [S0]) for n, x in plain.items()}
    y = (leaves["x"] * 3).redistribute(placements=[R])
    y.mul_(2)
    value = p.linear(y, leaves["w"]).sum()
    with count_collectives() as backward:
        value.backward()
    backward.assert_counts(all_reduce=1)
    _check(world, leaves, plain, lambda t: p.sum(p.linear(t["x"] * 6, t["w"])))


@distributed(world_size=2)
def test_to_local_takes_the_face_that_its_gradient_asks_for(world: World) -> None:
    mesh, p = init_device_mesh(world.device_type, (2,)), world.platform
    x = _leaf(world, mesh, _make(world, (4, 3)), [S0])
    local = (x * 1).redistribute(placements=[R]).to_local(grad_placements=[Partial()])
    value = p.sum(local * float(world.rank + 1))
    with count_collectives() as backward:
        p.backward([value])
    backward.assert_counts(reduce_scatter=1)
    assert p.to_numpy(x.grad.to_local()).tolist() == [[3.0] * 3] * 2
    assert isinstance(x.grad, DTensor)
