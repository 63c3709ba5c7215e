"""Runs of unequal length: from and to everything else, with gradients and launches."""

from typing import Any

import pytest

from hp_dtensor import DTensor, Partial, RaggedShard, Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def _real(world: World) -> str:
    """The widest floating dtype that can be reduced: HCCL has no float64."""
    return "float64" if world.platform.supports("reduce_float64", world.device_type) else "float32"


def _full(world: World, start: int = 1) -> Any:
    p = world.platform
    return p.reshape(p.tensor([float(start + i) for i in range(24)], _real(world), world.device), (6, 2, 2))


def _check(world: World, mesh: Any, source: Any, target: Any) -> None:
    p, name = world.platform, f"{source} to {target}"
    full, seed = _full(world), _full(world, 7)
    local = p.set_requires_grad_(p.clone(distribute_tensor(full, mesh, source).to_local()), True)
    x = DTensor.from_local(local, mesh, source, shape=full.shape)
    y = x.redistribute(placements=target)
    assert y.placements == tuple(target)
    assert tuple(y.to_local().shape) == y._spec.local_shape
    assert_parity(y.full_tensor(), full, exact=True, name=name)
    if y is not x:
        y.backward(seed)
        gradient = DTensor.from_local(p.get_grad(local), mesh, x._spec.grad.placements, shape=full.shape)
        assert_parity(gradient.full_tensor(), seed, exact=True, name=f"gradient, {name}")


@distributed(world_size=(1, 2, 3))
def test_runs_come_from_and_go_to_everything(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (world.size,))
    units = {1: [(3,), (1,)], 2: [(1, 2), (0, 3), (3, 0)], 3: [(1, 2, 3), (0, 2, 0)]}[world.size]
    runs = [RaggedShard(dims, one) for one in units for dims in ((0,), (0, 1), (0, 1, 2))]
    others = [R, S0, S1, Partial(), Partial("max") if world.size == 2 else Partial("prod")]
    for run in runs:
        for other in others:
            if not other.is_partial("prod"):
                _check(world, mesh, [other], [run])
            _check(world, mesh, [run], [other])
        _check(world, mesh, [run], [runs[-1]])


@distributed(world_size=2)
def test_each_change_costs_one_launch(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    run, other = RaggedShard((0,), (1, 2)), RaggedShard((0,), (2, 1))
    for source, target, launches in (
        (R, run, {}),
        (run, R, {"all_gather": 1}),
        (run, other, {"all_to_all": 1}),
        (Partial(), run, {"reduce_scatter": 1}),
        (run, S1, {"all_gather": 1}),
    ):
        x = distribute_tensor(_full(world), mesh, [source])
        with count_collectives() as counted:
            x.redistribute(placements=[target])
        counted.assert_counts(**launches)


@distributed(world_size=4, backends=("torch", "cuda"))
def test_other_mesh_dims_are_replicas(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2, 2))
    run = RaggedShard((0,), (1, 2))
    for source, target in (([R, run], [S0, S1]), ([run, R], [R, run]), ([S0, Partial()], [R, run])):
        _check(world, mesh, source, target)
    with pytest.raises(ValueError, match=r"beside Shard\(0\): all other mesh dims must be Replicate"):
        distribute_tensor(_full(world), mesh, [S0, run])


@distributed(world_size=2)
def test_elementwise_operations_and_sums_leave_runs_as_they_lie(world: World) -> None:
    mesh, p = init_device_mesh(world.device_type, (2,)), world.platform
    near = 1e-11 if _real(world) == "float64" else 1e-4  # a few hundred roundings of numbers below 1e4
    for units in ((1, 2), (0, 3)):
        run = RaggedShard((0,), units)
        plain = p.set_requires_grad_(_full(world), True)
        x = distribute_tensor(plain, mesh, [run])
        scale = distribute_tensor(p.full((), 3.0, plain.dtype, p.device_of(plain)), mesh, [Replicate()])
        with count_collectives() as counted:
            y = (x * scale + x / 2 - 1) * x
            total, mean = y.sum(), (x * x).mean()
        counted.assert_counts()
        assert y.placements == (run,)
        assert total.placements == mean.placements == (Partial(),)
        whole = (plain * 3.0 + plain / 2 - 1) * plain
        assert_parity(y.full_tensor(), whole, rtol=near, atol=near, name="runs")
        assert_parity(total.full_tensor(), whole.sum(), rtol=near, atol=near, name="sum")
        assert_parity(mean.full_tensor(), (plain * plain).mean(), rtol=near, atol=near, name="mean")
        (total + mean).backward()
        expected = 7 * _full(world) - 1 + 2 * _full(world) / 24
        assert x.grad.placements == (run,)
        assert_parity(x.grad.full_tensor(), expected, rtol=near, atol=near, name=f"gradient of {units}")


@distributed(world_size=2)
def test_operations_gather_runs_first_and_local_tensors_need_a_shape(world: World) -> None:
    mesh, p = init_device_mesh(world.device_type, (2,)), world.platform
    run = RaggedShard((0,), (1, 2))
    x = distribute_tensor(p.set_requires_grad_(_full(world), True), mesh, [run])
    assert tuple(x.to_local().shape) == ((8,), (16,))[world.rank]
    (x * x).reshape(-1).sum().backward()
    assert x.grad.placements == (run,)
    assert_parity(x.grad.full_tensor(), _full(world) * 2, exact=True, name="gradient of a run")
    with pytest.raises(
        ValueError, match="the runs of a RaggedShard do not say the global shape; give shape="
    ):
        DTensor.from_local(x.to_local(), mesh, [run])
