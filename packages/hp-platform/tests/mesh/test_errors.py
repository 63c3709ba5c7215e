"""Wrong questions to a mesh: each is refused at once, with what was given, what was expected, and what to change."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from hp_platform.group import ProcessGroup
from hp_platform.mesh import DeviceMesh, init_device_mesh

pytestmark = pytest.mark.once

VIRTUAL = "interleaved_parallel"

QUERIES: list[tuple[str, Callable[[DeviceMesh], Any], type[Exception], str]] = [
    (
        "unknown name",
        lambda m: m["ep"],
        KeyError,
        "no dim is named 'ep'; the dims, flattened ones included, are pp, dp, tp, pp_dp",
    ),
    (
        "unknown name in slice",
        lambda m: m["pp", "dp"]["tp"],
        KeyError,
        "no dim is named 'tp'; the dims are pp, dp",
    ),
    ("key an int", lambda m: m[0], TypeError, "a mesh is sliced by a name or a tuple of names, .* not by 0"),
    ("key a list", lambda m: m[["dp"]], TypeError, r"not by \['dp'\]"),
    ("key half str", lambda m: m["dp", 1], TypeError, r"not by \('dp', 1\)"),
    (
        "key empty",
        lambda m: m[()],
        ValueError,
        r"mesh\[\(\)\] asks for no dim; give at least one of pp, dp, tp",
    ),
    (
        "key order",
        lambda m: m["tp", "dp"],
        ValueError,
        r"does not keep the mesh's order of dims; write mesh\[\('dp', 'tp'\)\]",
    ),
    (
        "key order of slice",
        lambda m: m["dp", "tp"]["tp", "dp"],
        ValueError,
        r"order of dims; write mesh\[\('dp', 'tp'\)\]",
    ),
    ("key order flattened", lambda m: m["tp", "pp_dp"], ValueError, r"write mesh\[\('pp_dp', 'tp'\)\]"),
    ("key twice", lambda m: m["dp", "dp"], ValueError, "names a dim twice; give each once"),
    (
        "key overlaps",
        lambda m: m["dp", "pp_dp"],
        RuntimeError,
        r"dims 'dp' and 'pp_dp' overlap: .* \(dp\) and \(pp, dp\)",
    ),
    (
        "flattened dims around another",
        lambda m: (m["pp", "tp"].flatten("outer"), m["outer", "dp"]),
        NotImplementedError,
        r"every framework and device.*'outer' is made of \(pp, tp\).*DeviceMesh.concatenate",
    ),
    (
        "flatten to a root dim",
        lambda m: m["pp", "dp"].flatten("tp"),
        ValueError,
        "root mesh has a dim of that name",
    ),
    (
        "flatten name reused",
        lambda m: m["dp", "tp"].flatten("pp_dp"),
        ValueError,
        r"flattened dims \(pp, dp\), not \(dp, tp\)",
    ),
    ("flatten no str", lambda m: m.flatten(3), TypeError, "mesh_dim_name must be a str, not int"),
    ("flatten empty name", lambda m: m.flatten(""), ValueError, "mesh_dim_name is empty"),
    ("flatten reserved", lambda m: m.flatten(VIRTUAL), ValueError, f"{VIRTUAL!r} is reserved"),
    (
        "unflatten product",
        lambda m: m.unflatten("tp", (3, 2), ("a", "b")),
        ValueError,
        r"multiply to 6, but dim 'tp' has size 4",
    ),
    (
        "unflatten nameless",
        lambda m: m.unflatten("tp", (2, 2)),
        ValueError,
        "have names; give mesh_dim_names",
    ),
    (
        "unflatten name taken",
        lambda m: m.unflatten("tp", (2, 2), ("dp", "b")),
        ValueError,
        "has a name twice",
    ),
    ("unflatten reserved", lambda m: m.unflatten("tp", (2, 2), ("b", VIRTUAL)), ValueError, "is reserved"),
    (
        "unflatten a list",
        lambda m: m.unflatten("tp", [2, 2], ("a", "b")),
        TypeError,
        "mesh_sizes must be a tuple of int",
    ),
    (
        "concatenate nothing",
        lambda m: DeviceMesh.concatenate([]),
        ValueError,
        "concatenate needs at least one mesh",
    ),
    (
        "concatenate no mesh",
        lambda m: DeviceMesh.concatenate([m, "tp"]),
        TypeError,
        "concatenate takes a list of DeviceMesh",
    ),
    (
        "concatenate one dim twice",
        lambda m: DeviceMesh.concatenate([m["dp"], m["dp", "tp"]]),
        RuntimeError,
        "'dp' and 'dp' overlap",
    ),
    (
        "concatenate of two roots",
        lambda m: DeviceMesh.concatenate([m["dp"], init_device_mesh("cpu", (2,), ("x",), _rank=0)]),
        ValueError,
        "meshes cut out of one root, not of several",
    ),
    (
        "dim out of range",
        lambda m: m.size(3),
        ValueError,
        "mesh dim 3 does not exist: the mesh has 3 dims, -3 to 2",
    ),
    (
        "dim unknown",
        lambda m: m.get_local_rank("ep"),
        KeyError,
        "no dim is named 'ep'; the dims are pp, dp, tp",
    ),
    ("dim a float", lambda m: m.size(1.0), TypeError, "must be an integer, not 1.0"),
    (
        "local rank of what",
        lambda m: m.get_local_rank(),
        RuntimeError,
        "get_local_rank on a mesh with 3 dims .* one of pp, dp, tp",
    ),
    (
        "group of what",
        lambda m: m.get_group(),
        RuntimeError,
        "get_group on a mesh with 3 dims .* give mesh_dim",
    ),
    (
        "rank elsewhere",
        lambda m: m.get_devices_for_axis("tp", 99),
        ValueError,
        "rank 99 is not in DeviceMesh",
    ),
    (
        "map length",
        lambda m: m.get_global_shape((2, 2), (0,)),
        ValueError,
        r"has 2 dims and tensor_map \(0,\) 1",
    ),
    (
        "map id",
        lambda m: m.get_global_shape((2,), (3,)),
        ValueError,
        r"has the entry 3; .* 0 \(last dim\) to 2",
    ),
    ("map twice", lambda m: m.get_global_shape((2, 2), (0, (1, 0))), ValueError, "uses a mesh dim twice"),
    (
        "from no group",
        lambda m: DeviceMesh.from_group([], "cpu"),
        ValueError,
        "from_group needs at least one group",
    ),
    (
        "no world",
        lambda m: init_device_mesh("cpu", (1,), init_backend=False).get_group(),
        RuntimeError,
        "init_process_group",
    ),
    ("axis unknown", lambda m: m.axis_id("ep"), KeyError, "no dim is named 'ep'"),
]


@pytest.mark.parametrize(("call", "error", "message"), [pytest.param(*row[1:], id=row[0]) for row in QUERIES])
def test_a_wrong_question_is_refused(
    call: Callable[[DeviceMesh], Any], error: type[Exception], message: str
) -> None:
    mesh = init_device_mesh("cpu", (2, 3, 4), ("pp", "dp", "tp"), _rank=0)
    mesh["pp", "dp"].flatten()
    with pytest.raises(error) as caught:
        call(mesh)
    assert type(caught.value) is error
    assert re.search(message, str(caught.value.args[0]))


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m["dp"],
        lambda m: m.flatten(),
        lambda m: m.size("dp"),
        lambda m: m.axis_index("dp"),
        lambda m: DeviceMesh.concatenate([m]),
    ],
)
def test_names_are_asked_of_a_mesh_without_names(call: Callable[[DeviceMesh], Any]) -> None:
    with pytest.raises(
        RuntimeError, match="needs dim names, which DeviceMesh.* has not: make the mesh with mesh_dim_names"
    ):
        call(init_device_mesh("cpu", (2, 2), _rank=0))


def test_new_dims_of_a_mesh_without_names_have_none() -> None:
    with pytest.raises(ValueError, match="have no names; leave mesh_dim_names out"):
        init_device_mesh("cpu", (4,), _rank=0).unflatten(0, (2, 2), ("a", "b"))


@pytest.mark.parametrize("what", ["get_local_rank", "get_group", "get_rank_list_along_axis"])
def test_a_rank_outside_of_the_mesh_has_no_group(what: str, join: Callable[[int, int], ProcessGroup]) -> None:
    join(5, 6)
    mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"), rank_list=[0, 1, 2, 3])
    assert mesh.get_coordinate() is None
    assert mesh["tp"].rank_list == (0, 1)
    assert mesh["tp"].get_coordinate() is None
    for asked in (mesh, mesh["tp"]):
        with pytest.raises(
            RuntimeError, match=rf"{what}: rank 5 is not in DeviceMesh.*only ranks of the mesh may ask"
        ):
            getattr(asked, what)("tp")


def test_a_mesh_beyond_the_world_is_refused(join: Callable[[int, int], ProcessGroup]) -> None:
    join(4, 5)
    with pytest.raises(ValueError, match=r"mesh_shape \(2, 4\) holds 8 ranks, but the world has 5"):
        init_device_mesh("cpu", (2, 4))
    with pytest.raises(
        ValueError, match=r"do not tile the world of 5: the block of rank 4 would be \[4, 5\]; give rank_list"
    ):
        init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="rank_list has the rank 5, but the world has only the ranks 0 to 4"):
        init_device_mesh("cpu", (2,), rank_list=[4, 5])
    with pytest.raises(ValueError, match="mesh has the rank 7, but the world has only the ranks 0 to 4"):
        DeviceMesh("cpu", [0, 7])


def test_a_mesh_seen_from_another_rank_makes_no_groups(join: Callable[[int, int], ProcessGroup]) -> None:
    join(1, 4)
    mesh = init_device_mesh("cpu", (4,), _rank=2)
    with pytest.raises(RuntimeError, match="was made for rank 2, but this process is rank 1 of the world"):
        mesh.get_group()


def test_groups_that_do_not_fit_the_mesh_are_refused(
    join: Callable[[int, int], ProcessGroup], groups: Any
) -> None:
    world = join(1, 4)
    with pytest.raises(ValueError, match="2 groups do not say how their ranks are arranged; give mesh"):
        DeviceMesh.from_group([world, world], "cpu")
    with pytest.raises(ValueError, match="has 2 dims, but 1 groups are given; give one group per dim"):
        DeviceMesh.from_group([world], "cpu", [[0, 1], [2, 3]])
    with pytest.raises(
        ValueError, match=r"dim 0 of .* joins rank 1 with the ranks \[1, 3\], but its group is the group of 4"
    ):
        DeviceMesh.from_group([world, groups.handle((0, 1))], "cpu", [[0, 1], [2, 3]])


def test_virtual_dims_are_neither_flattened_nor_split() -> None:
    mesh = init_device_mesh("cpu", (2, 4), ("dp", VIRTUAL), _rank=0)
    with pytest.raises(ValueError, match=f"{VIRTUAL!r} is virtual and cannot be flattened"):
        mesh.flatten()
    with pytest.raises(ValueError, match=f"{VIRTUAL!r} is virtual and cannot be split"):
        mesh.unflatten(VIRTUAL, (2, 2), ("a", "b"))
