"""From any placement to any other: plans by arithmetic, values, gradients and counts on workers."""

import itertools
import random
from typing import Any

import pytest

from hp_dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, redistribute_plan
from hp_dtensor.placements import StridedShard
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

REDUCED: list[Placement] = [Partial(op) for op in ("sum", "avg", "max", "min", "prod")]
PLACEMENTS: list[Placement] = [Shard(0), Shard(1), Replicate(), *REDUCED]
SHAPES = [(5, 3), (1, 2), (1, 8), (8, 2), (3, 0)]


def _real(world: World) -> str:
    """The widest floating dtype that can be reduced: HCCL has no float64."""
    return "float64" if world.platform.supports("reduce_float64", world.device_type) else "float32"


def _tolerance(world: World, of_float64: float) -> float:
    """The same number of roundings, in the dtype of the run."""
    return of_float64 * (1 if _real(world) == "float64" else 2.0**29)


def _mesh(world: World, shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh(world.device_type, shape)


def _full(world: World, shape: tuple[int, ...], start: int = 1) -> Any:
    count = shape[0] * shape[1]
    return world.platform.reshape(
        world.platform.tensor([float(start + i) for i in range(count)], _real(world), world.device), shape
    )


def _pairs(mesh: DeviceMesh, limit: int) -> list[tuple[tuple[Placement, ...], tuple[Placement, ...]]]:
    ways = list(itertools.product(PLACEMENTS, repeat=mesh.ndim))
    if mesh.ndim == 2:
        inner = StridedShard(0, mesh.shape[1]), StridedShard(1, mesh.shape[1])
        ways = [*ways, (inner[0], Shard(0)), (inner[1], Shard(1))]
    pairs = list(itertools.product(ways, ways))
    return random.Random(0).sample(pairs, min(limit, len(pairs)))


def _check_pair(world: World, mesh: DeviceMesh, shape: tuple[int, ...], source: Any, target: Any) -> None:
    platform = world.platform
    full, seed = _full(world, shape), _full(world, shape, 7)
    local = platform.set_requires_grad_(
        platform.clone(distribute_tensor(full, mesh, source).to_local()), True
    )
    x = DTensor.from_local(local, mesh, source, shape=shape)
    y = x.redistribute(placements=target)
    name = f"{shape} on {mesh.shape} from {source} to {target}"
    assert y.placements == target, name
    # Averages and ties divide by the number of ranks, a power of two here, so everything is exact.
    assert_parity(y.full_tensor(), full, exact=True, name=name)
    of_factors = any(p.is_partial("prod") for p in source)  # their gradients lie in no placement
    if platform.requires_grad(y.to_local()) and y.to_local() is not local and not of_factors:
        y.backward(seed)
        gradient = DTensor.from_local(platform.get_grad(local), mesh, x._spec.grad.placements, shape=shape)
        assert_parity(gradient.full_tensor(), seed, exact=True, name=f"gradient, {name}")


@distributed(world_size=(2, 4), timeout=180)
def test_every_pair_on_a_line_of_ranks(world: World) -> None:
    mesh = _mesh(world, (world.size,))
    for shape in SHAPES:
        for source, target in _pairs(mesh, 1000):
            _check_pair(world, mesh, shape, source, target)


@distributed(world_size=4, backends=("torch", "cuda"))
def test_pairs_on_a_grid_of_ranks(world: World) -> None:
    mesh = _mesh(world, (2, 2))
    for shape in SHAPES:
        for source, target in _pairs(mesh, 70):
            _check_pair(world, mesh, shape, source, target)


@distributed(world_size=(2, 4))
def test_ranks_in_another_order_than_ascending(world: World) -> None:
    order = [1, 0] if world.size == 2 else [2, 0, 3, 1]
    mesh = DeviceMesh(world.device_type, order)
    for source, target in _pairs(mesh, 1000):
        _check_pair(world, mesh, (5, 3), source, target)
    x = distribute_tensor(_full(world, (5, 3)), mesh, [Shard(0)])
    index = order.index(world.rank)
    assert x._spec.local_offset == (min(5, index * -(-5 // world.size)), 0)


@distributed(world_size=3, backends=("torch", "cuda"))
def test_three_ranks_and_averages(world: World) -> None:
    mesh = _mesh(world, (3,))
    for source, target in _pairs(mesh, 1000):
        if not any(at.is_partial(op) for at in (source[0], target[0]) for op in ("avg", "max", "min")):
            _check_pair(world, mesh, (5, 3), source, target)
    x = distribute_tensor(_full(world, (5, 3)), mesh, [Shard(0)]).redistribute(placements=[Partial("avg")])
    # Times three and divided by three: one rounding each at values up to 15.
    assert_parity(
        x.full_tensor(), _full(world, (5, 3)), rtol=_tolerance(world, 1e-15), name="through an average"
    )


@pytest.mark.parametrize("op", ["max", "min"])
@distributed(world_size=4, backends=("torch", "cuda"))
def test_extremes_come_a_cheaper_way_to_the_same_values_where_nothing_is_recorded(
    world: World, op: str
) -> None:
    mesh, platform = _mesh(world, (2, 2)), world.platform
    own = (_full(world, (8, 4)) * (7 + 2 * world.rank)) % 6  # some tie, some do not; even, as plans count
    leaf = platform.set_requires_grad_(platform.clone(own), True)
    x, recorded = (DTensor.from_local(local, mesh, [Partial(op)] * 2) for local in (own, leaf))
    saved = 0
    for target in itertools.product((Shard(0), Shard(1), Replicate()), repeat=2):
        expected = recorded.redistribute(placements=target).detach()
        with count_collectives() as counted:
            y = x.redistribute(placements=target)
        with count_collectives() as unrecorded, platform.no_grad():
            z = recorded.redistribute(placements=target)
        for found in (y, z, x.redistribute(placements=target, async_op=True).wait()):
            assert_parity(found.detach(), expected, exact=True, name=f"to {target}")
        assert counted.record.launches == unrecorded.record.launches
        plans = [redistribute_plan(given, placements=target).nbytes for given in (x, recorded)]
        assert plans[0] <= plans[1], f"to {target}: {plans}"
        saved = saved + plans[1] - plans[0]
    assert saved > 0


COUNTS = {
    ("Shard(0)", "Replicate()"): ({"all_gather": 1}, {}),
    ("Replicate()", "Shard(0)"): ({}, {"all_gather": 1}),
    ("Partial('sum')", "Replicate()"): ({"all_reduce": 1}, {}),
    ("Partial('sum')", "Shard(1)"): ({"reduce_scatter": 1}, {"all_gather": 1}),
    ("Partial('avg')", "Shard(0)"): ({"reduce_scatter": 1}, {"all_gather": 1}),
    ("Replicate()", "Partial('sum')"): ({}, {}),
    ("Shard(1)", "Partial('sum')"): ({}, {}),
    ("Shard(0)", "Shard(1)"): ({"all_to_all": 1}, {"all_to_all": 1}),
}


@pytest.mark.parametrize("pair", COUNTS, ids=" to ".join)
@distributed(world_size=2)
def test_each_change_costs_one_collective_and_its_adjoint(pair: tuple[str, str], world: World) -> None:
    names = {repr(p): p for p in PLACEMENTS}
    mesh, platform = _mesh(world, (2,)), world.platform
    source, target = names[pair[0]], names[pair[1]]
    local = platform.set_requires_grad_(
        platform.clone(distribute_tensor(_full(world, (4, 6)), mesh, [source]).to_local()), True
    )
    x = DTensor.from_local(local, mesh, [source], shape=(4, 6))
    seed = distribute_tensor(_full(world, (4, 6)), mesh, [target])
    seed = seed.redistribute(placements=x.redistribute(placements=[target])._spec.grad.placements)
    forward, backward = COUNTS[pair]
    with count_collectives() as counted:
        y = x.redistribute(placements=[target])
    counted.assert_counts(**forward)
    with count_collectives() as counted:
        platform.backward([y.to_local()], [seed.to_local()])
    counted.assert_counts(**backward)


@distributed(world_size=1)
def test_one_rank_never_communicates(world: World) -> None:
    mesh = _mesh(world, (1,))
    with count_collectives() as counted:
        for source, target in _pairs(mesh, 1000):
            _check_pair(world, mesh, (5, 3), source, target)
    counted.assert_counts()


@distributed(world_size=2)
def test_from_local_finds_uneven_shapes_and_refuses_what_no_chunks_are(world: World) -> None:
    mesh, platform = _mesh(world, (2,)), world.platform
    rows = [3, 2][world.rank]
    with count_collectives() as counted:
        x = DTensor.from_local(platform.zeros((rows, 2), _real(world), world.device), mesh, [Shard(0)])
    assert tuple(x.shape) == (5, 2)
    counted.assert_counts(all_gather=1)
    with count_collectives() as counted:
        DTensor.from_local(
            platform.zeros((rows, 2), _real(world), world.device), mesh, [Shard(0)], shape=(5, 2)
        )
        DTensor.from_local(platform.zeros((5, 2), _real(world), world.device), mesh, [Partial()])
    counted.assert_counts()
    with pytest.raises(
        ValueError,
        match=r"hold shapes \[\(1, 2\), \(4, 2\)\], which are not the chunks of one tensor \(sizes \(3, 2\)",
    ):
        DTensor.from_local(
            platform.zeros(([1, 4][world.rank], 2), _real(world), world.device), mesh, [Shard(0)]
        )


@distributed(world_size=2)
def test_run_check_tells_disagreement_and_takes_replicas_from_the_first_rank(world: World) -> None:
    mesh, platform = _mesh(world, (2,)), world.platform
    x = DTensor.from_local(
        platform.full((2,), float(world.rank + 1), _real(world), world.device),
        mesh,
        [Replicate()],
        run_check=True,
    )
    assert platform.to_numpy(x.to_local()).tolist() == [1.0, 1.0]
    dtype = ["float32", "float16"][world.rank]
    with pytest.raises(ValueError, match="disagree: dtype float32.*; dtype float16"):
        DTensor.from_local(platform.zeros((2,), dtype, world.device), mesh, [Replicate()], run_check=True)


@distributed(world_size=(2, 4))
def test_distribute_from_one_rank_needs_no_equal_values_elsewhere(world: World) -> None:
    mesh, source = _mesh(world, (world.size,)), world.size - 1
    full = _full(world, (5, 3))
    mine = full if world.rank == source else full * 0
    for placement in PLACEMENTS:
        x = distribute_tensor(mine, mesh, [placement], src_data_rank=source)
        assert_parity(x.full_tensor(), full, exact=True, name=f"{placement}")
    with count_collectives() as counted:
        distribute_tensor(mine, mesh, [Shard(1)], src_data_rank=source)
    counted.assert_counts(scatter=1)


@distributed(world_size=2)
def test_distribute_keeps_leaves_dtypes_and_uses_the_current_mesh(world: World) -> None:
    platform = world.platform
    full = platform.set_requires_grad_(_full(world, (4, 2)), True)
    with _mesh(world, (2,)):
        x = distribute_tensor(full, placements=[Shard(0)])
        whole = distribute_tensor(platform.tensor([1, 2], "int32", world.device))
    assert x.requires_grad
    assert x.is_leaf
    assert not whole.requires_grad
    assert whole.placements == (Replicate(),)
    assert platform.dtype_name(whole.dtype) == "int32"
    platform.copy_(platform.detach(full), _full(world, (4, 2), 50))
    assert_parity(x.full_tensor(), _full(world, (4, 2)), exact=True, name="owns its memory")


@distributed(world_size=4, backends=("torch", "cuda"))
def test_faults_that_others_reported(world: World) -> None:
    """Rows 17, 18 and 20 of our list of pitfalls."""
    line, grid, p = _mesh(world, (4,)), _mesh(world, (2, 2)), world.platform
    # Ten rows on four ranks: the ranks agree on the global shape, or all of them are told.
    rows = [3, 3, 3, 1][world.rank]
    assert DTensor.from_local(p.zeros((rows, 2), _real(world), world.device), line, [Shard(0)]).shape == (
        10,
        2,
    )
    other = p.zeros(([2, 3, 3, 2][world.rank], 2), _real(world), world.device)
    with pytest.raises(ValueError, match="which are not the chunks of one tensor"):
        DTensor.from_local(other, line, [Shard(0)])
    # A view whose rows are no rows of the shards.
    full = _full(world, (12, 8))
    x = distribute_tensor(full, line, [Shard(1)]).reshape((-1, 6))
    assert_parity(x.full_tensor(), p.reshape(full, (-1, 6)), exact=True, name="view")
    # Two mesh dims on one tensor dim, in both orders, and a local tensor of either.
    for size, order in itertools.product(
        range(1, 10), ([Shard(0), Shard(0)], [StridedShard(0, 2), Shard(0)])
    ):
        full = _full(world, (size, 3))
        x = distribute_tensor(full, grid, order)
        assert_parity(x.full_tensor(), full, exact=True, name=f"{size} rows, {order}")
        again = DTensor.from_local(x.to_local(), grid, order)
        assert again.shape == (size, 3)
        assert_parity(
            (again * again).full_tensor(), full * full, exact=True, name=f"product, {size} rows, {order}"
        )
        assert (again * again).placements == again.placements
        turned = again.t()
        assert_parity(turned.full_tensor(), full.t(), exact=True, name=f"transpose, {size} rows, {order}")
