"""Operations on DTensors: every spelling finds its rule, sums are carried by what is linear alone, nothing runs on shards by accident."""

from typing import Any

import pytest

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def _real(world: World) -> str:
    """The widest floating dtype that can be reduced: HCCL has no float64."""
    return "float64" if world.platform.supports("reduce_float64", world.device_type) else "float32"


def _tolerance(world: World, of_float64: float) -> float:
    """The same number of roundings, in the dtype of the run."""
    return of_float64 * (1 if _real(world) == "float64" else 2.0**29)


def _mesh(world: World) -> DeviceMesh:
    return init_device_mesh(world.device_type, (world.size,))


def _values(world: World, *shape: int) -> Any:
    count = 1
    for n in shape:
        count = count * n
    values = [((i * 7) % 11 - 5) / 2 or 3.0 for i in range(count)]
    return world.platform.reshape(world.platform.tensor(values, _real(world), world.device), shape)


OPERATORS = {
    "x + y": (lambda x, y: x + y, P),
    "x - y": (lambda x, y: x - y, P),
    "2 + x": (lambda x, y: 2 + x, R),
    "2 - x": (lambda x, y: 2 - x, R),
    "x - 2": (lambda x, y: x - 2, R),
    "x + True": (lambda x, y: x + True, R),
    "-x": (lambda x, y: -x, P),
    "x * 2": (lambda x, y: x * 2, P),
    "-5.0 * x": (lambda x, y: -5.0 * x, P),
    "x * y": (lambda x, y: x * y, R),
    "x / 4": (lambda x, y: x / 4, P),
    "2 / x": (lambda x, y: 2 / x, R),
    "x / y": (lambda x, y: x / y, R),
    "x ** 2": (lambda x, y: x**2, R),
    "2.0 ** x": (lambda x, y: 2.0**x, R),
    "x // 2": (lambda x, y: x // 2, R),
    "x > y": (lambda x, y: x > y, R),
    "x == 2": (lambda x, y: x == 2, R),
    "abs": (lambda x, y: x.abs(), R),
    "exp": (lambda x, y: x.exp(), R),
    "sum": (lambda x, y: x.sum(0), P),
    "mean": (lambda x, y: x.mean(), P),
    "x.add(y)": (lambda x, y: x.add(y), P),
    "view": (lambda x, y: x.view(3, 5), P),
    "reshape": (lambda x, y: x.reshape((15,)), P),
    "transpose": (lambda x, y: x.transpose(0, 1), P),
    "permute": (lambda x, y: x.permute(1, 0), P),
    "T": (lambda x, y: x.T, P),
    "flatten": (lambda x, y: x.flatten(), P),
    "unsqueeze": (lambda x, y: x.unsqueeze(1), P),
    "squeeze": (lambda x, y: x.unsqueeze(0).squeeze(0), P),
}


@pytest.mark.parametrize("text", OPERATORS)
@distributed(world_size=2)
def test_only_what_is_linear_carries_a_sum(text: str, world: World) -> None:
    call, carried = OPERATORS[text]
    mesh = _mesh(world)
    x, y = _values(world, 5, 3), _values(world, 5, 3) * 2
    dx, dy = (distribute_tensor(t, mesh, [S0]).redistribute(placements=[P]) for t in (x, y))
    for _ in range(2):  # the second time from the cache
        found = call(dx, dy)
        assert found.placements == (carried,)
        # Summands of 5 rows and one zero: exact but for a sum's order.
        assert_parity(
            found, call(x, y), rtol=_tolerance(world, 1e-15), atol=_tolerance(world, 1e-15), name=text
        )


@pytest.mark.parametrize("text", OPERATORS)
@distributed(world_size=2)
def test_operators_and_methods_on_uneven_shards(text: str, world: World) -> None:
    call, _ = OPERATORS[text]
    x, y = _values(world, 5, 3), _values(world, 5, 3) * 2
    dx, dy = (distribute_tensor(t, _mesh(world), [S0]) for t in (x, y))
    assert_parity(
        call(dx, dy), call(x, y), rtol=_tolerance(world, 1e-14), atol=_tolerance(world, 1e-15), name=text
    )


@distributed(world_size=2)
def test_scalars_of_one_type_share_a_plan_and_keep_their_values(world: World) -> None:
    x = distribute_tensor(_values(world, 4), _mesh(world), [P])
    plans = x._spec.plans
    first = x * 2
    known = len(plans)
    results = [x * n for n in (-5, 7, 0)]
    assert len(plans) == known
    assert_parity(x * 2.0, first, exact=True)
    for n, result in zip((2, -5, 7, 0), [first, *results], strict=True):
        # Summands 0 and -x make a zero of another sign than x times 0.
        assert_parity(result, _values(world, 4) * n, atol=0.0, name=f"times {n}")


@distributed(world_size=2)
def test_casts_carry_a_sum_to_floating_dtypes_only(world: World) -> None:
    p = world.platform
    local = p.full((2,), 1.25 + 0.5 * world.rank, _real(world), world.device)
    x = DTensor.from_local(local, _mesh(world), [P])
    narrow = x.to(p.dtype("float16"))
    assert (narrow.placements, p.dtype_name(narrow.dtype)) == ((P,), "float16")
    whole = x.to(p.dtype("int32"))
    assert whole.placements == (R,)
    assert whole.tolist() == [3, 3]


@distributed(world_size=2)
def test_plain_constants_count_as_replicated(world: World) -> None:
    x, table = _values(world, 5, 3), _values(world, 5, 1)
    dx = distribute_tensor(x, _mesh(world), [S0])
    with count_collectives() as counted:
        result = dx * table + table
    counted.assert_counts()
    assert result.placements == (S0,)
    assert_parity(result, x * table + table, exact=True)
    assert_parity(table * dx, table * x, exact=True)


@distributed(world_size=2)
def test_what_changes_nothing_returns_the_same_tensor(world: World) -> None:
    x = distribute_tensor(_values(world, 4, 2), _mesh(world), [S0])
    assert x.contiguous() is x
    assert x.redistribute(placements=[S0]) is x


@distributed(world_size=2)
def test_clones_have_their_own_memory(world: World) -> None:
    x = distribute_tensor(_values(world, 4), _mesh(world), [P])
    copy = x.clone()
    assert copy.placements == (P,)
    assert_parity(copy.to_local(), x.to_local(), exact=True)
    assert world.platform.data_ptr(copy.to_local()) != world.platform.data_ptr(x.to_local())


@distributed(world_size=2)
def test_one_tensor_twice_is_moved_once(world: World) -> None:
    x = distribute_tensor(_values(world, 4), _mesh(world), [P])
    with count_collectives() as counted:
        result = x * x
    counted.assert_counts(all_reduce=1)
    assert_parity(result, _values(world, 4) * _values(world, 4), exact=True)


@distributed(world_size=2)
def test_values_are_reduced_before_they_are_read(world: World) -> None:
    p, mesh = world.platform, _mesh(world)
    total = DTensor.from_local(p.full((), 2.0, _real(world), world.device), mesh, [P])
    one = distribute_tensor(p.tensor([7.0], _real(world), world.device), mesh, [S0])
    assert (total.item(), float(total), int(total), bool(total - 4)) == (4.0, 4.0, 4, False)
    assert (one.item(), one.tolist()) == (7.0, [7.0])
    assert f"{total:.1f}" == "4.0"


@distributed(world_size=2)
def test_metadata_is_global_and_repr_shows_where_it_lies(world: World) -> None:
    x = distribute_tensor(_values(world, 5, 3), _mesh(world), [Shard(-2)])
    assert (tuple(x.shape), x.ndim, x.dim(), x.numel(), len(x)) == ((5, 3), 2, 2, 15, 5)
    assert x.local_shape == ((3, 3), (2, 3))[world.rank]
    assert tuple(x.to_local().shape) == x.local_shape
    assert x.device_mesh == _mesh(world)
    assert repr(x).startswith(
        f"DTensor(shape=(5, 3), dtype={_real(world)}, placements=(Shard(0),), mesh=DeviceMesh("
    )
    assert repr(x) == str(x) == f"{x}"
    assert not x.requires_grad


@distributed(world_size=2)
def test_detach_leaves_the_graph_and_keeps_the_memory(world: World) -> None:
    p = world.platform
    x = distribute_tensor(p.set_requires_grad_(_values(world, 4), True), _mesh(world), [S0])
    apart = (x * 2).detach()
    assert x.requires_grad
    assert not apart.requires_grad
    assert p.data_ptr(x.detach().to_local()) == p.data_ptr(x.to_local())


@distributed(world_size=2)
def test_views_keep_a_cut_where_blocks_stay_blocks(world: World) -> None:
    mesh = _mesh(world)
    kept = distribute_tensor(_values(world, 4, 6), mesh, [S0])
    moved = distribute_tensor(_values(world, 12, 8), mesh, [S1])
    with count_collectives() as counted:
        assert kept.view(2, 2, 6).placements == (S0,)
        assert kept.view(24).placements == (S0,)
        assert kept.unsqueeze(0).placements == (S1,)
    counted.assert_counts()
    with count_collectives() as counted:
        joined = moved.view(-1, 6)
    counted.assert_counts(all_gather=1)
    assert joined.placements == (R,)
    assert_parity(joined, _values(world, 16, 6), exact=True)


@distributed(world_size=2)
def test_views_keep_the_cut_of_a_batch_without_rows_as_of_any_other(world: World) -> None:
    mesh = _mesh(world)
    for rows in (2, 0):
        x, y = (distribute_tensor(_values(world, rows, 3, 4), mesh, [cut]) for cut in (S0, Shard(2)))
        with count_collectives() as counted:
            assert x.view(rows * 3, 4).placements == x.view(rows, 12).placements == (S0,)
            assert y.view(rows * 3, 4).placements == (S1,)
            assert y.view(rows, 3, 2, 2).placements == (Shard(2),)
            assert y.view(rows, 1, 3, 4).placements == (Shard(3),)
        counted.assert_counts()
        assert tuple(y.view(rows * 3, 4).to_local().shape) == (rows * 3, 2)


@distributed(world_size=2)
def test_view_as_takes_the_shape_of_another(world: World) -> None:
    mesh = _mesh(world)
    x = distribute_tensor(_values(world, 4, 3), mesh, [S0])
    other = distribute_tensor(_values(world, 12), mesh, [R])
    assert_parity(x.reshape_as(other), _values(world, 12), exact=True)


@distributed(world_size=2)
def test_equal_meshes_are_one_and_an_empty_world_is_none(world: World) -> None:
    x = distribute_tensor(_values(world, 4), DeviceMesh(world.device_type, [0, 1]), [S0])
    y = distribute_tensor(_values(world, 4), DeviceMesh(world.device_type, [0, 1]), [S0])
    assert x.device_mesh is not y.device_mesh
    assert_parity(x + y, _values(world, 4) * 2, exact=True)


@distributed(world_size=2)
def test_what_is_whole_on_another_mesh_of_the_same_ranks_is_so_on_this_one(world: World) -> None:
    values, tolerance = _values(world, 3), _tolerance(world, 1e-13)
    square = DeviceMesh(world.device_type, [[0], [1]])
    x = distribute_tensor(values, _mesh(world), [S0])
    for at, number in (([Replicate(), Replicate()], 0), ([Partial(), Replicate()], 1)):
        y = distribute_tensor(values + 1, square, at)
        with count_collectives() as counted:
            product = x * y
        counted.assert_counts(all_reduce=number)
        assert product.device_mesh is x.device_mesh and product.placements == (S0,)
        assert_parity(product, values * (values + 1), atol=tolerance)


@distributed(world_size=2)
def test_gradients_go_to_both_meshes(world: World) -> None:
    platform, tolerance = world.platform, _tolerance(world, 1e-13)
    square = DeviceMesh(world.device_type, [[0], [1]])
    x = platform.set_requires_grad_(distribute_tensor(_values(world, 3), _mesh(world), [S0]), True)
    y = platform.set_requires_grad_(distribute_tensor(_values(world, 3) + 1, square, [Replicate()] * 2), True)
    (x * y).sum().backward()
    assert_parity(x.grad, _values(world, 3) + 1, atol=tolerance)
    assert_parity(y.grad, _values(world, 3), atol=tolerance)
    assert y.grad.device_mesh is square


@distributed(world_size=2)
def test_functions_of_one_rule_do_not_share_what_they_do_with_an_empty_piece(world: World) -> None:
    name = world.platform.dtype_name
    x = distribute_tensor(_values(world, 1), _mesh(world), [S0])
    assert name(x.exp().dtype) == _real(world)
    assert name((x > 0).dtype) == "bool"
    assert (x > 0).tolist() == [False]
