"""Queries by example: the notations of tensor maps, the virtual dim, what is shown."""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hp_platform.mesh import DeviceMesh, init_device_mesh

pytestmark = pytest.mark.once


@pytest.fixture
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 3, 4), ("pp", "dp", "tp"), _rank=17)


def test_axes_count_from_both_ends(mesh: DeviceMesh) -> None:
    assert [mesh.axis_index(name) for name in ("pp", "dp", "tp")] == [0, 1, 2]
    assert [mesh.axis_id(name) for name in ("pp", "dp", "tp", "None")] == [2, 1, 0, -1]
    assert mesh.get_device_num_along_axis("dp") == mesh.size("dp") == mesh.size(1) == 3


def test_the_global_shape_multiplies_by_the_dims_that_split(mesh: DeviceMesh) -> None:
    assert mesh.get_global_shape((5, 7), (-1, -1)) == (5, 7)
    assert mesh.get_global_shape((5, 7), (0, 2)) == (20, 14)
    assert mesh.get_global_shape((5, 7, 1), ((2, 0), -1, [1])) == (40, 7, 3)
    assert mesh.get_global_shape((), ()) == ()


def test_lines_hold_the_other_coordinates(mesh: DeviceMesh) -> None:
    assert mesh.get_rank() == mesh.rank == 17
    assert mesh.get_coordinate() == (1, 1, 1)
    assert mesh.get_rank_list_along_axis("pp") == [5, 17]
    assert mesh.get_devices_for_axis("dp", 0) == [0, 4, 8]
    assert mesh["dp"].get_local_rank() == mesh.get_local_rank("dp") == mesh.get_local_rank(-2) == 1


@pytest.mark.parametrize(
    "given",
    [range(4, 12, 2), [4, 6, 8, 10], (4, 6, 8, 10), array("q", [4, 6, 8, 10]), np.arange(4, 12, 2)],
    ids=lambda given: type(given).__name__,
)
def test_ranks_are_given_as_any_sequence(given: Sequence[int]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), rank_list=given, _rank=8)
    assert mesh.rank_list == (4, 6, 8, 10) and all(type(rank) is int for rank in mesh.rank_list)
    assert mesh.get_coordinate() == (1, 0)


@pytest.mark.parametrize("given", [{0, 1}, {0: 1, 1: 0}, b"\0\1", iter([0, 1]), 2, np.int64(2)])
def test_ranks_without_an_order_or_a_length_are_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=f"must be a sequence of int .*, not {type(given).__name__}"):
        init_device_mesh("cpu", (2,), rank_list=given, _rank=0)


def test_a_mesh_is_identified_by_shape_names_and_ranks(mesh: DeviceMesh) -> None:
    assert mesh.to_hash() == ((2, 3, 4), ("pp", "dp", "tp"), tuple(range(24)))
    assert mesh["dp"].to_hash() == ((3,), ("dp",), (13, 17, 21))


def test_a_mesh_shows_its_dims_and_ranks(mesh: DeviceMesh) -> None:
    assert repr(mesh) == "DeviceMesh('cpu', pp=2, dp=3, tp=4, ranks 0..23)"
    assert repr(mesh["pp"]) == "DeviceMesh('cpu', pp=2, ranks [5, 17])"
    assert repr(DeviceMesh("gpu", [[4, 3], [2, 1]], _rank=0)) == "DeviceMesh('cuda', 2x2, ranks [4, 3, 2, 1])"
    long = init_device_mesh("cpu", (9,), rank_list=list(range(0, 18, 2)), _rank=0)
    assert repr(long) == "DeviceMesh('cpu', 9, ranks [0, 2, 4, 6, ..., 16])"


def test_the_rank_array_is_read_only_int32(mesh: DeviceMesh) -> None:
    assert mesh.mesh.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        mesh.mesh[0, 0, 0] = 1


def test_every_kind_of_array_of_ranks_is_read() -> None:
    wanted = DeviceMesh("cpu", [[0, 1], [2, 3]], _rank=0)
    for ranks in (((0, 1), (2, 3)), np.arange(4).reshape(2, 2), [list(np.arange(2)), list(np.arange(2, 4))]):
        assert DeviceMesh("cpu", ranks, _rank=0) == wanted


def test_positions_in_the_group_follow_ascending_ranks() -> None:
    mesh = DeviceMesh("cpu", [[6, 0], [2, 4]], _rank=6)
    assert mesh.group_positions(0) == (1, 0)
    assert mesh.group_positions(1) == (1, 0)
    assert DeviceMesh("cpu", [5, 1, 3], _rank=1).group_positions() == (2, 0, 1)
    assert mesh.get_local_rank(0) == 0


def test_flattened_dims_are_known_to_the_root(mesh: DeviceMesh) -> None:
    flat = mesh["pp", "tp"].flatten("model")
    assert flat.flatten("model") is flat.flatten() is flat
    assert flat["model"] is flat
    assert mesh["dp"].flatten() is mesh["dp"]
    renamed = mesh["dp"].flatten("data")
    assert renamed.mesh_dim_names == ("data",)
    assert renamed.rank_list == mesh["dp"].rank_list
    assert mesh["pp", "data"].rank_list == mesh["pp", "dp"].rank_list
    assert mesh["dp"].get_flatten_mapping() == {"model": flat, "data": renamed}
    assert mesh["pp", "tp"].flatten("model") is mesh["model"] is flat


def test_flattened_and_split_dims_of_a_slice_go_on(mesh: DeviceMesh) -> None:
    parts = mesh["dp", "tp"].unflatten("tp", (2, 2), ("cp", "tp_inner"))
    assert parts.root_mesh is mesh
    assert parts.mesh_dim_names == ("dp", "cp", "tp_inner")
    assert parts["cp"].rank_list == (17, 19)
    fsdp = parts["dp", "cp"].flatten("fsdp")
    assert fsdp.rank_list == (13, 15, 17, 19, 21, 23)
    assert mesh["fsdp"] is fsdp
    joined = DeviceMesh.concatenate([fsdp, parts["tp_inner"]])
    assert joined.mesh_dim_names == ("fsdp", "tp_inner")
    assert joined.shape == (6, 2)
    assert DeviceMesh.concatenate([mesh["tp"], mesh["pp"]]) is mesh["pp", "tp"]


def test_the_names_of_torch_work_too(mesh: DeviceMesh) -> None:
    flat = mesh["dp", "tp"]._flatten("x")
    assert flat is mesh["dp", "tp"].flatten("x")
    assert flat._unflatten(0, (3, 4), ("a", "b")).shape == (3, 4)
    assert DeviceMesh._concatenate([mesh["dp"], mesh["tp"]]) is mesh["dp", "tp"]


def test_a_virtual_dim_takes_no_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 3, 2), ("dp", "tp", "interleaved_parallel"), _rank=7)
    assert mesh.shape == (2, 3, 2)
    assert mesh.size() == 6
    assert mesh.size("interleaved_parallel") == 2
    # The blocks that tile the world count devices.
    assert mesh.rank_list == (6, 7, 8, 9, 10, 11)
    assert mesh.get_coordinate() == (0, 1, 0)
    np.testing.assert_array_equal(mesh.mesh, np.arange(6, 12).reshape(2, 3, 1).repeat(2, axis=2))
    assert mesh.group_ranks("interleaved_parallel") == ((6,), (7,), (8,), (9,), (10,), (11,))
    assert mesh.group_ranks("dp") == ((6, 9), (7, 10), (8, 11))
    assert mesh["interleaved_parallel"].rank_list == (7,)
    assert mesh["tp", "interleaved_parallel"].shape == (3, 2)
    assert mesh["tp", "interleaved_parallel"].rank_list == (6, 7, 8)
    assert mesh.get_global_shape((1, 1), ((1, 0), 2)) == (6, 2)
    assert DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _rank=7) == mesh


def test_importing_meshes_loads_neither_a_framework_nor_numpy() -> None:
    script = (
        "import sys; from hp_platform.mesh import init_device_mesh; m = init_device_mesh('cpu', (2, 2), ('a', 'b'), _rank=1);"
        "m['a'].flatten('x'); print(sorted({'torch', 'torch_npu', 'mindspore', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
