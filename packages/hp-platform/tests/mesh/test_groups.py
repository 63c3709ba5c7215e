"""Which groups a mesh asks for, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hp_platform import _process, group_of, process_groups
from hp_platform.group import ProcessGroup
from hp_platform.mesh import DeviceMesh, init_device_mesh

pytestmark = pytest.mark.once

Join = Callable[[int, int], ProcessGroup]


def test_groups_are_made_when_asked_for_and_shared_by_ranks(join: Join, groups: Any) -> None:
    world = join(3, 8)
    mesh = init_device_mesh("cpu", (2, 2, 2), ("pp", "dp", "tp"))
    fsdp = mesh["pp", "dp"].flatten("fsdp")
    assert groups.made == []
    tp = mesh.get_group("tp")
    assert tp.ranks == (2, 3)
    assert tp.rank == mesh.get_local_rank("tp") == 1
    assert groups.made == [(2, 3)]
    same = [
        mesh.get_group(2),
        mesh.get_group(-1),
        mesh["tp"].get_group(),
        mesh["dp", "tp"].get_comm_group_by_axis("tp"),
    ]
    assert all(group is tp for group in same)
    assert DeviceMesh("cpu", [2, 3]).get_group() is tp
    assert groups.made == [(2, 3)]
    assert fsdp.get_group().ranks == (1, 3, 5, 7)
    assert mesh.flatten("all").get_group() is world
    assert [group.ranks for group in mesh.get_all_groups()] == [(3, 7), (1, 3), (2, 3)]
    assert groups.made == [(2, 3), (1, 3, 5, 7), (3, 7), (1, 3)]


def test_dims_of_size_one_and_virtual_dims_make_no_group(join: Join, groups: Any) -> None:
    join(1, 2)
    mesh = init_device_mesh("cpu", (1, 2, 4), ("pp", "dp", "interleaved_parallel"))
    for name in ("pp", "interleaved_parallel"):
        assert mesh.get_group(name).ranks == (1,)
        assert mesh.get_group(name).native is None
    assert groups.made == []


def test_the_ranks_of_a_group_ascend_whatever_the_mesh_does(join: Join) -> None:
    join(2, 4)
    mesh = init_device_mesh("cpu", (4,), ("dp",), rank_list=[3, 2, 1, 0])
    group = mesh.get_group()
    assert group.ranks == (0, 1, 2, 3)
    assert mesh.get_local_rank() == 1
    assert group.ranks[mesh.group_positions()[mesh.get_local_rank()]] == mesh.rank


def test_a_group_that_was_destroyed_is_made_anew(
    join: Join, groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "destroy_group", lambda native: None, raising=False)
    join(0, 4)
    mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    first = mesh.get_group("tp")
    process_groups.destroy_process_group(first)
    second = mesh.get_group("tp")
    assert second is not first
    assert mesh.get_group("tp") is second
    join(0, 4)
    assert mesh.get_group("tp") is not second
    assert groups.made == [(0, 1)] * 3


def test_asking_for_a_group_makes_the_world(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    asked: list[Any] = []

    def init_process_group(*, device_id: Any) -> None:
        asked.append(device_id)
        join(1, 2)

    monkeypatch.setattr(process_groups, "init_process_group", init_process_group)
    mesh = init_device_mesh("cpu", (2,), ("dp",))
    assert _process.state.world is None
    assert mesh.get_group() is process_groups.get_world()
    # The kind without an index: which one of the host's devices is the launcher's to say.
    assert asked == ["cpu"]
    # From now on the mesh hangs on the world.
    assert init_device_mesh("cpu", (2,), ("dp",)) is mesh


def test_a_mesh_without_backend_leaves_the_world_to_the_user(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    mesh = init_device_mesh("cpu", (2,), init_backend=False)
    with pytest.raises(RuntimeError, match=r"call hp_platform.init_process_group\(\) first"):
        mesh.get_group()
    world = join(1, 2)
    assert mesh.get_group() is world


def test_a_mesh_of_a_group_that_exists(join: Join, groups: Any) -> None:
    world = join(1, 4)
    assert DeviceMesh.from_group(world, "cpu").get_group() is world
    mesh = DeviceMesh.from_group(world, "cpu", mesh_dim_names=("dp",))
    assert mesh.mesh_dim_names == ("dp",)
    assert mesh.rank_list == (0, 1, 2, 3)
    ours = group_of([1, 3])
    theirs = groups.handle((0, 1))
    mesh = DeviceMesh.from_group([ours, theirs], "cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    assert mesh.get_group("dp") is ours
    tp = mesh.get_group("tp")
    assert tp.native is theirs
    assert tp.ranks == (0, 1)
    assert mesh["tp"].get_group() is group_of([0, 1]) is tp
    assert groups.made == [(1, 3)]
    assert DeviceMesh.from_group(theirs, "cpu").get_group() is tp


def test_the_best_device_is_taken_where_none_is_named(groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Best:
        name = "npu"

    monkeypatch.setattr(groups, "device", lambda: Best, raising=False)
    assert init_device_mesh(None, (1,)).device_type == "npu"
    assert init_device_mesh(mesh_shape=(1,)).device_type == "npu"
