"""Redistribution to other meshes and other ranks, asynchronously, and as a plan that is only read."""

import gc
import itertools
from typing import Any

import pytest

from hp_dtensor import (
    DTensor,
    Layout,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    redistribute_plan,
    transfer,
)
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def _real(world: World) -> str:
    """The widest floating dtype that can be reduced: HCCL has no float64."""
    return "float64" if world.platform.supports("reduce_float64", world.device_type) else "float32"


def _full(world: World, shape: tuple[int, int] = (5, 3), start: int = 1) -> Any:
    values = [float(start + i) for i in range(shape[0] * shape[1])]
    return world.platform.reshape(world.platform.tensor(values, _real(world), world.device), shape)


@distributed(world_size=4, backends=("torch", "cuda"))
def test_another_mesh_of_the_same_ranks(world: World) -> None:
    p = world.platform
    meshes = [
        (
            init_device_mesh(world.device_type, (4,)),
            [[S0], [S1], [R], [P], [RaggedShard((0,), (1, 0, 3, 1))]],
        ),
        (init_device_mesh(world.device_type, (2, 2)), [[S0, S1], [S0, S0], [StridedShard(0, 2), S0], [R, P]]),
        (DeviceMesh(world.device_type, [3, 1, 0, 2]), [[S0], [Partial("avg")]]),
    ]
    for (first, sources), (second, targets) in itertools.permutations(meshes, 2):
        for source, target in itertools.product(sources, targets):
            name = f"{source} on {first} to {target} on {second}"
            local = p.set_requires_grad_(
                p.clone(distribute_tensor(_full(world), first, source).to_local()), True
            )
            x = DTensor.from_local(local, first, source, shape=(5, 3))
            y = x.redistribute(second, target)
            assert (y.device_mesh, y.placements) == (second, tuple(target))
            assert_parity(y.full_tensor(), _full(world), exact=True, name=name)
            y.backward(_full(world, start=7))
            gradient = DTensor.from_local(p.get_grad(local), first, x._spec.grad.placements, shape=(5, 3))
            assert_parity(gradient.full_tensor(), _full(world, start=7), exact=True, name=f"gradient, {name}")


@distributed(world_size=4, backends=("torch", "cuda"))
def test_another_mesh_costs_one_exchange_of_what_is_lacking(world: World) -> None:
    line, grid = init_device_mesh(world.device_type, (4,)), init_device_mesh(world.device_type, (2, 2))
    x = distribute_tensor(_full(world, (8, 4)), line, [S0])
    for target, elements in (([S0, S0], 0), ([S0, S1], 4), ([StridedShard(0, 2), S0], 8)):
        with count_collectives() as counted:
            x.redistribute(grid, target)
        counted.assert_counts(all_to_all=1)
        itemsize = world.platform.itemsize(x.dtype)
        plan = redistribute_plan(x, grid, target)
        assert counted.record.nbytes() <= plan.nbytes == elements * itemsize


@distributed(world_size=3, min_world_size=3)
def test_other_ranks_get_a_tensor_and_give_its_gradient_back(world: World) -> None:
    p = world.platform
    first = DeviceMesh(world.device_type, [0, 1], mesh_dim_names=("a",))
    second = DeviceMesh(world.device_type, [2, 1], mesh_dim_names=("b",))
    for at, to in ((S0, S1), (P, S0), (S1, R), (S0, P)):
        source, target = Layout.from_device_mesh(first)([at]), Layout.from_device_mesh(second)([to])
        x = None
        if world.rank < 2:
            x = distribute_tensor(p.set_requires_grad_(_full(world), not at.is_partial()), first, [at])
        y = transfer(
            x, target, source=source, shape=(5, 3), dtype=_real(world), requires_grad=not at.is_partial()
        )
        if world.rank > 0:
            assert_parity(y.full_tensor(), _full(world), exact=True, name=f"{at} to {to}")
        if at.is_partial():
            if world.rank == 0:
                with pytest.raises(RuntimeError, match="requires no grad, so nothing comes back"):
                    y.backward()
            continue
        y.backward() if world.rank == 0 else y.backward(_full(world, start=7))
        if x is not None:
            assert_parity(
                x.grad.full_tensor(), _full(world, start=7), exact=True, name=f"gradient, {at} to {to}"
            )


@distributed(world_size=3, min_world_size=3)
def test_transfers_and_meshes_that_do_not_fit_are_refused(world: World) -> None:
    mesh = DeviceMesh(world.device_type, [0, 1, 2], mesh_dim_names=("a",))
    other = DeviceMesh(world.device_type, [0, 1], mesh_dim_names=("b",))
    x = distribute_tensor(_full(world), mesh, [S0])
    with pytest.raises(ValueError, match="goes to a mesh of the same ranks .* hp_dtensor.transfer"):
        x.redistribute(other, [S0])
    with pytest.raises(ValueError, match="outside of the tensor's mesh needs source=, shape= and dtype="):
        transfer(None, Layout.from_device_mesh(other)("b", "None"))
    with pytest.raises(ValueError, match=r"takes a Layout as target, got \[Shard\(0\)\]"):
        transfer(x, [S0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be a hp_platform.DeviceMesh, got str"):
        x.redistribute("cpu", [S0])  # type: ignore[arg-type]


@distributed(world_size=2)
def test_asynchronous_redistribution_gives_the_same_and_starts_at_once(world: World) -> None:
    mesh, p = init_device_mesh(world.device_type, (2,)), world.platform
    ways = [S0, S1, R, P, Partial("avg"), Partial("max"), RaggedShard((0,), (2, 3))]
    launching = {
        (S0, R): "all_gather",
        (S0, S1): "all_to_all",
        (P, R): "all_reduce",
        (P, S1): "reduce_scatter",
    }
    for source, target in itertools.product(ways, ways):
        name = f"{source} to {target}"
        local = p.set_requires_grad_(
            p.clone(distribute_tensor(_full(world), mesh, [source]).to_local()), True
        )
        x = DTensor.from_local(local, mesh, [source], shape=(5, 3))
        with count_collectives() as started:
            handle = x.redistribute(placements=[target], async_op=True)
        with count_collectives() as finished:
            y = handle.wait()
        assert handle.wait() is y
        if (source, target) in launching:
            started.assert_counts(**{launching[source, target]: 1})
            finished.assert_counts()
        assert_parity(y.full_tensor(), _full(world), exact=True, name=name)
        y.backward(_full(world, start=7))
        gradient = DTensor.from_local(p.get_grad(local), mesh, x._spec.grad.placements, shape=(5, 3))
        assert_parity(gradient.full_tensor(), _full(world, start=7), exact=True, name=f"gradient, {name}")


@distributed(world_size=(2, 3))
def test_asynchronous_redistributions_cross_each_other_and_may_be_dropped(world: World) -> None:
    mesh, p = init_device_mesh(world.device_type, (world.size,)), world.platform
    x, y = (
        distribute_tensor(p.set_requires_grad_(_full(world, start=start), True), mesh, [at])
        for start, at in ((1, S0), (50, S1))
    )
    # Dropped: nobody waits, nothing hangs, and no gradient is lost.
    x.redistribute(placements=[R], async_op=True)
    y.redistribute(placements=[S0], async_op=True)
    gc.collect()
    # Crossing: waited for in another order than started, and others run in between.
    first, second = (t.redistribute(placements=[R], async_op=True) for t in (x * 2, y * 3))
    between = (x.redistribute(placements=[S1]) * y).sum()
    b = second.wait()
    third = b.redistribute(placements=[S0], async_op=True)
    a = first.wait()
    (third.wait() * a).sum().backward()
    between.backward()
    left, right = (p.set_requires_grad_(_full(world, start=start), True) for start in (1, 50))
    p.backward([p.sum(left * 2 * (right * 3)) + p.sum(left * right)])
    for name, mine, whole in (("x", x, left), ("y", y, right)):
        # Sums of two products of whole numbers: exact.
        assert_parity(mine.grad, p.get_grad(whole), exact=True, name=name)


@distributed(world_size=2)
def test_an_asynchronous_redistribution_takes_the_values_of_its_start(world: World) -> None:
    mesh, p = init_device_mesh(world.device_type, (2,)), world.platform
    for source, target in ((S0, S1), (S1, S0), (S0, S0), (R, S0)):
        x = distribute_tensor(_full(world), mesh, [source])
        handle = x.redistribute(placements=[target], async_op=True)
        y = handle.wait()
        assert handle.wait() is y and y.placements == (target,)
        assert (y is x) == (source == target)
        with p.no_grad():
            x.mul_(0)
        if source != target and source != R:
            assert_parity(y.full_tensor(), _full(world), exact=True, name=f"{source} to {target}")
    with pytest.raises(ValueError, match="got 2 placements"):
        x.redistribute(placements=[S0, S0], async_op=True)


def _grid() -> Layout:
    mesh = init_device_mesh(
        "cpu", (2, 4), ("dp", "tp"), rank_list=list(range(8)), init_backend=False, _rank=0
    )
    return Layout.from_device_mesh(mesh)


def test_a_plan_is_a_table_with_the_bytes_of_each_step() -> None:
    layout = _grid()(S0, P)
    plan = redistribute_plan(layout, placements=[S0, S1], shape=(8, 16), dtype="float32")
    assert [(step.kind, step.mesh_dim, step.nbytes) for step in plan.steps] == [("reduce_scatter", "tp", 192)]
    assert str(plan).splitlines() == [
        "(Shard(0), Partial('sum')) -> (Shard(0), Shard(1)) of (8, 16), 4 bytes per element",
        "step            mesh dim  ranks  from -> to                  bytes per rank",
        "reduce_scatter  tp        4      Partial('sum') -> Shard(1)             192",
        "total                                                                   192",
    ]
    plan = redistribute_plan(layout, shape=(8, 16), dtype="float64")
    assert [step.kind for step in plan.steps] == ["all_reduce", "all_gather"]
    assert plan.nbytes == 2 * 64 * 8 * 3 // 4 + 128 * 8 // 2
    turned = redistribute_plan(
        _grid()(("dp", "tp"), "None"), placements=(("tp", "dp"), "None"), shape=(8, 16)
    )
    assert [(step.kind, step.mesh_dim, step.num_ranks) for step in turned.steps] == [("exchange", "all", 8)]
    with pytest.raises(ValueError, match="of a Layout needs shape="):
        redistribute_plan(layout)
    assert str(redistribute_plan(layout, placements=layout, shape=(8, 16))).endswith("0")
