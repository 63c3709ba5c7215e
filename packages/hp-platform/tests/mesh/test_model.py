"""Meshes against a plain numpy model: an array of ranks, indexed, transposed and reshaped."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_platform.mesh import DeviceMesh, init_device_mesh

pytestmark = pytest.mark.once

NAMES = ("pp", "dp", "cp", "tp")
shapes = (
    st.lists(st.sampled_from([1, 2, 3, 4, 5]), min_size=1, max_size=4)
    .map(tuple)
    .filter(lambda s: math.prod(s) <= 48)
)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Ranks in a random order, not all ranks of the world."""
    shape = draw(shapes)
    order = draw(st.permutations(range(math.prod(shape))))
    return np.array(order).reshape(shape) + draw(st.integers(0, 3))


def mesh_of(array: np.ndarray, rank: int, names: tuple[str, ...] | None = NAMES) -> DeviceMesh:
    given_names = None if names is None else names[: array.ndim]
    ranks = [int(r) for r in array.ravel()]
    return init_device_mesh("cpu", array.shape, given_names, rank_list=ranks, _rank=rank)


def model(array: np.ndarray, rank: int, dims: list[tuple[int, ...]]) -> np.ndarray:
    """The ranks at this rank's other coordinates, with one dim per tuple of the array's dims."""
    at = np.argwhere(array == rank)[0]
    flat = [dim for group in dims for dim in group]
    kept = array[tuple(slice(None) if dim in flat else at[dim] for dim in range(array.ndim))]
    order = [sorted(flat).index(dim) for dim in flat]
    return kept.transpose(order).reshape([math.prod(array.shape[dim] for dim in group) for group in dims])


def assert_same(mesh: DeviceMesh, array: np.ndarray, rank: int) -> None:
    """Every pure query agrees with the array."""
    assert mesh.shape == mesh.mesh_shape == array.shape
    assert mesh.ndim == array.ndim
    assert mesh.size() == array.size
    assert mesh.rank_list == tuple(array.ravel())
    assert mesh.mesh.dtype == np.int32
    np.testing.assert_array_equal(mesh.mesh, array)
    places = np.argwhere(array == rank)
    coordinate = tuple(int(c) for c in places[0]) if len(places) else None
    assert mesh.get_coordinate() == coordinate
    for dim in range(array.ndim):
        lines = np.moveaxis(array, dim, -1).reshape(-1, array.shape[dim])
        assert mesh.group_ranks(dim) == tuple(tuple(int(r) for r in line) for line in lines)
        assert mesh.size(dim) == mesh.size(dim - array.ndim) == array.shape[dim]
        if coordinate is not None:
            mine = next(line for line in lines if rank in line)
            assert mesh.get_local_rank(dim) == coordinate[dim]
            assert mesh.get_rank_list_along_axis(dim) == list(mine)
            assert [sorted(mine)[at] for at in mesh.group_positions(dim)] == list(mine)


@given(arrays())
@settings(max_examples=60, deadline=None)
def test_every_rank_finds_its_coordinates_and_lines(array: np.ndarray) -> None:
    outside = int(array.max()) + 1
    for rank in [*map(int, array.ravel()), outside]:
        mesh = mesh_of(array, rank)
        assert_same(mesh, array, rank)
        assert_same(mesh_of(array, rank, names=None), array, rank)
        assert mesh == DeviceMesh("cpu", array, mesh_dim_names=NAMES[: array.ndim], _rank=rank)
        for other in map(int, array.ravel()):
            line = next(line for line in mesh.group_ranks(0) if other in line)
            assert mesh.get_devices_for_axis("pp", other) == list(line)


@given(arrays(), st.data())
@settings(max_examples=150, deadline=None)
def test_slices_are_the_ranks_at_the_other_coordinates(array: np.ndarray, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from([int(r) for r in array.ravel()]))
    dims = sorted(data.draw(st.sets(st.integers(0, array.ndim - 1), min_size=1)))
    mesh = mesh_of(array, rank)
    sub = mesh[tuple(NAMES[dim] for dim in dims)]
    assert_same(sub, model(array, rank, [(dim,) for dim in dims]), rank)
    assert sub.root_mesh is mesh
    assert sub.mesh_dim_names == tuple(NAMES[dim] for dim in dims)
    for dim in dims:
        assert sub[NAMES[dim]] is mesh[NAMES[dim]]
        assert_same(mesh[NAMES[dim]], model(array, rank, [(dim,)]), rank)
        assert set(sub.group_ranks(NAMES[dim])) <= set(mesh.group_ranks(NAMES[dim]))


@given(arrays(), st.data())
@settings(max_examples=150, deadline=None)
def test_flattened_dims_run_through_the_slice_in_row_major_order(
    array: np.ndarray, data: st.DataObject
) -> None:
    rank = data.draw(st.sampled_from([int(r) for r in array.ravel()]))
    dims = (
        tuple(sorted(data.draw(st.sets(st.integers(0, array.ndim - 1), min_size=2))))
        if array.ndim > 1
        else (0,)
    )
    mesh = mesh_of(array, rank)
    flat = mesh[tuple(NAMES[dim] for dim in dims)].flatten()
    assert_same(flat, model(array, rank, [dims]), rank)
    assert mesh["_".join(NAMES[dim] for dim in dims)] is flat
    # Beside other dims of the root, before or after: where the flattened ones follow each other.
    if dims == tuple(range(dims[0], dims[-1] + 1)) and len(dims) > 1:
        rest = [dim for dim in range(array.ndim) if dim not in dims]
        whole = sorted([dims, *((dim,) for dim in rest)])
        names = tuple("_".join(NAMES[dim] for dim in group) for group in whole)
        assert_same(mesh[names], model(array, rank, whole), rank)


@given(arrays(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_dim_splits_like_a_reshape(array: np.ndarray, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from([int(r) for r in array.ravel()]))
    dim = data.draw(st.integers(0, array.ndim - 1))
    sizes = data.draw(factors_of(array.shape[dim]))
    mesh = mesh_of(array, rank)
    new = tuple(f"new{i}" for i in range(len(sizes)))
    got = mesh.unflatten(dim, sizes, new)
    shape = (*array.shape[:dim], *sizes, *array.shape[dim + 1 :])
    assert_same(got, array.reshape(shape), rank)
    assert_same(mesh_of(array, rank, names=None).unflatten(dim, sizes), array.reshape(shape), rank)
    at = np.argwhere(array.reshape(shape) == rank)[0]
    for index, name in enumerate(new):
        line = array.reshape(shape)[
            tuple(slice(None) if d == dim + index else at[d] for d in range(len(shape)))
        ]
        assert_same(got[name], line, rank)
    # The parts flattened again hold what the whole dim held.
    assert_same(got[new].flatten("again"), model(array, rank, [(dim,)]), rank)
    assert_same(DeviceMesh.concatenate([got[name] for name in reversed(new)]), got[new].mesh, rank)


@st.composite
def factors_of(draw: st.DrawFn, size: int) -> tuple[int, ...]:
    sizes: list[int] = []
    left = size
    for _ in range(draw(st.integers(0, 2))):
        taken = draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
        sizes.append(taken)
        left //= taken
    return (*sizes, left)


@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=2, max_size=3).map(tuple), st.data())
@settings(max_examples=150, deadline=None)
def test_a_flattened_dim_splits_where_its_dims_do(shape: tuple[int, ...], data: st.DataObject) -> None:
    # Sizes that refine, coarsen, or re-cut the flattened ones: right where possible, refused where they cut across.
    array = np.arange(math.prod(shape)).reshape(shape)
    rank = data.draw(st.integers(0, array.size - 1))
    sizes = data.draw(factors_of(array.size))
    flat = mesh_of(array, rank).flatten("all")
    names = tuple(f"new{i}" for i in range(len(sizes)))
    if cuts_across(shape, sizes):
        with pytest.raises(ValueError, match="cut across the dims that 'all' was flattened from"):
            flat.unflatten("all", sizes, names)
    else:
        assert_same(flat.unflatten("all", sizes, names), array.reshape(sizes), rank)


def cuts_across(shape: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether some boundary of the one lies between two of the other without dividing the span between them."""
    ends = {math.prod(shape[at:]) for at in range(len(shape) + 1)} | {
        math.prod(sizes[at:]) for at in range(len(sizes) + 1)
    }
    ordered = sorted(ends)
    return any(outer % inner for inner, outer in itertools.pairwise(ordered))


@given(arrays(), st.data())
@settings(max_examples=150, deadline=None)
def test_concatenated_meshes_hold_the_dims_of_all_in_root_order(
    array: np.ndarray, data: st.DataObject
) -> None:
    rank = data.draw(st.sampled_from([int(r) for r in array.ravel()]))
    mesh = mesh_of(array, rank)
    owner = data.draw(st.lists(st.integers(-1, 2), min_size=array.ndim, max_size=array.ndim))
    parts = [tuple(dim for dim in range(array.ndim) if owner[dim] == part) for part in range(3)]
    parts = data.draw(st.permutations([part for part in parts if part]))
    if not parts:
        return
    flattened = [data.draw(st.booleans()) and len(part) > 1 for part in parts]
    meshes, dims = [], []
    for part, flat in zip(parts, flattened, strict=True):
        sub = mesh[tuple(NAMES[dim] for dim in part)]
        meshes.append(sub.flatten() if flat else sub)
        dims.extend([part] if flat else [(dim,) for dim in part])
    joined = DeviceMesh.concatenate(meshes)
    # Not only contiguous ones: a flattened dim stands where its outermost root dim does.
    assert_same(joined, model(array, rank, sorted(dims)), rank)
    assert joined.root_mesh is mesh


@given(shapes, st.integers(1, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_without_rank_list_blocks_tile_the_world(
    shape: tuple[int, ...], blocks: int, data: st.DataObject
) -> None:
    num = math.prod(shape)
    rank = data.draw(st.integers(0, blocks * num - 1))
    mesh = init_device_mesh("cpu", shape, _rank=rank)
    assert_same(mesh, np.arange(blocks * num).reshape(blocks, *shape)[rank // num], rank)


def test_dims_of_size_one_are_told_apart() -> None:
    mesh = init_device_mesh("cpu", (1, 1, 2), ("a", "b", "c"), _rank=0)
    mesh["a", "c"].flatten("x")
    with pytest.raises(ValueError, match=r"'x'.*flattened dims \(a, c\), not \(b, c\)"):
        mesh["b", "c"].flatten("x")
    with pytest.raises(RuntimeError, match="dims 'a' and 'x' overlap"):
        mesh["a", "x"]
    parts = mesh.unflatten("a", (1, 1), ("outer", "inner"))
    joined = DeviceMesh.concatenate([parts["inner"], parts["outer"], mesh["b"]])
    assert joined.mesh_dim_names == ("outer", "inner", "b")
    with pytest.raises(RuntimeError, match="dims 'outer' and 'a' overlap"):
        DeviceMesh.concatenate([parts["outer"], mesh["a"]])


def test_a_dim_of_size_one_stays_in_what_it_was_flattened_to() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 4), ("a", "b", "c"), _rank=5)
    # No step leads along a, so a and c follow each other although b lies between them.
    outer = mesh["a", "c"].flatten("outer")
    assert_same(mesh["outer", "b"], np.arange(8).reshape(2, 4).T, 5)
    parts = outer.unflatten("outer", (2, 2), ("x", "y"))
    with pytest.raises(RuntimeError, match="dims 'x' and 'a' overlap"):
        DeviceMesh.concatenate([parts["x"], mesh["a"]])
    assert DeviceMesh.concatenate([parts["y"], mesh["a"]]).mesh_dim_names == ("a", "y")


def test_parts_of_two_splittings_join_if_their_steps_do_not_cross() -> None:
    mesh = init_device_mesh("cpu", (8,), ("dp",), _rank=5)
    two_four, four_two = mesh.unflatten("dp", (2, 4), ("a", "b")), mesh.unflatten("dp", (4, 2), ("c", "d"))
    joined = DeviceMesh.concatenate([four_two["d"], two_four["a"]])
    assert joined.shape == (2, 2)
    assert joined.rank_list == (0, 1, 4, 5)
    with pytest.raises(RuntimeError, match="dims 'c' and 'b' overlap"):
        DeviceMesh.concatenate([four_two["c"], two_four["b"]])
