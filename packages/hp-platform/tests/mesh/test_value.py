"""A mesh is a value: equality, hash, copies, pickles, and the tables that make equal requests one object."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

from hp_platform import _process
from hp_platform.group import ProcessGroup
from hp_platform.mesh import DeviceMesh, init_device_mesh

pytestmark = pytest.mark.once

Join = Callable[[int, int], ProcessGroup]


def test_equal_meshes_have_equal_device_shape_names_and_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"), _rank=1)
    again = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"), _rank=1)
    assert mesh == again
    assert hash(mesh) == hash(again)
    # A slice of one root equals a mesh made by itself.
    assert mesh["tp"] == DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",), _rank=0)
    others = [
        DeviceMesh("cuda", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"), _rank=1),
        DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "cp"), _rank=1),
        DeviceMesh("cpu", [[0, 1], [2, 3]], _rank=1),
        DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"), _rank=1),
        DeviceMesh("cpu", [[0, 1, 2, 3]], mesh_dim_names=("dp", "tp"), _rank=1),
    ]
    assert len({mesh, again, *others}) == 6
    assert mesh != (2, 2)


def test_a_twin_is_equal_and_keeps_its_own_values() -> None:
    mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"), _rank=1)
    flat = mesh.flatten("all")
    mesh.interned["value"] = 1
    twin = mesh.twin()
    assert twin == mesh
    assert hash(twin) == hash(mesh)
    assert twin is not mesh
    assert not twin.interned
    assert twin["tp"] is mesh["tp"]
    assert twin["all"] is flat
    assert pickle.loads(pickle.dumps(twin)) == mesh
    assert mesh.root_mesh is mesh
    assert twin.root_mesh is mesh


def test_the_same_request_gives_the_same_mesh_while_the_world_lasts(join: Join) -> None:
    world = join(1, 4)
    mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    assert init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) is mesh
    assert init_device_mesh("cpu", (2, 2), ("dp", "tp"), rank_list=[0, 1, 2, 3], init_backend=False) is mesh
    assert init_device_mesh("cuda", (2, 2), ("dp", "tp")) is not mesh
    assert init_device_mesh("cpu", (2, 2)) is not mesh
    assert init_device_mesh("cpu", (2, 2), ("dp", "tp"), _rank=3).get_coordinate() == (1, 1)
    assert init_device_mesh("cpu", (2, 2), ("dp", "tp")) is mesh
    assert world.tables is not None
    assert mesh in world.tables.meshes.values()
    join(2, 4)
    new = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    assert new is not mesh
    assert new.get_coordinate() == (1, 0)


def test_each_block_of_a_larger_world_has_its_own_mesh(join: Join) -> None:
    join(6, 8)
    mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    assert mesh.rank_list == (4, 5, 6, 7)
    assert DeviceMesh("cpu").rank_list == tuple(range(8))


def test_specs_interned_on_a_mesh_are_found_by_the_same_request(join: Join) -> None:
    join(0, 4)
    mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    assert mesh.interned == {}
    mesh.interned["spec"] = 1
    assert init_device_mesh("cpu", (2, 2), ("dp", "tp")).interned == {"spec": 1}
    assert mesh["dp"].interned == {}
    mesh["dp"].interned["spec"] = 2
    assert mesh["dp"].interned == {"spec": 2}


def test_without_a_world_nothing_is_kept_in_the_process() -> None:
    meshes = [init_device_mesh("cpu", (2,), ("dp",), _rank=0) for _ in range(2)]
    assert meshes[0] is not meshes[1]
    assert meshes[0] == meshes[1]
    assert _process.state.world is None


def test_the_launcher_says_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert init_device_mesh("cpu", (2, 2)).get_coordinate() == (1, 1)
    assert DeviceMesh("cpu").rank_list == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="holds 8 ranks, but the world has 4"):
        init_device_mesh("cpu", (8,))
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    monkeypatch.setenv("RANK_ID", "1")
    assert init_device_mesh("cpu", (2,)).get_local_rank() == 1


def test_a_program_without_launcher_is_one_process() -> None:
    mesh = init_device_mesh("cpu", (1, 1), ("dp", "tp"))
    assert mesh.get_coordinate() == (0, 0)
    assert DeviceMesh("cpu").rank_list == (0,)


def test_a_copy_is_the_mesh_itself() -> None:
    sub = init_device_mesh("cpu", (2, 2), ("dp", "tp"), _rank=1)["tp"]
    assert copy.copy(sub) is sub
    held = copy.deepcopy({"mesh": sub, "root": sub.root_mesh})
    assert held["mesh"] is sub
    assert held["mesh"].root_mesh is held["root"] is sub.root_mesh


def test_a_pickled_mesh_is_found_again_in_its_world(join: Join) -> None:
    join(1, 8)
    root = init_device_mesh("cpu", (2, 2, 2), ("pp", "dp", "tp"))
    fsdp = root["pp", "dp"].flatten("fsdp")
    split = root["tp"].unflatten("tp", (2, 1), ("a", "b"))
    for mesh in (root, root["dp"], root["dp", "tp"], fsdp, split, split["a"]):
        again = pickle.loads(pickle.dumps(mesh))
        assert again is mesh
        assert again.root_mesh is root


def test_a_pickled_mesh_holds_its_ranks_on_every_other_rank(join: Join) -> None:
    join(1, 4)
    root = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    flat = root.flatten("all")
    written = pickle.dumps([root, root["tp"], flat])
    join(3, 4)
    again, sub, flat_again = pickle.loads(written)
    assert (again, sub, flat_again) == (root, root["tp"], flat)
    assert again is init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    assert again.get_coordinate() == (1, 1)
    assert flat_again is again["all"]
    assert flat_again.get_local_rank() == 3
    # Rank 3 is not on the line of ranks 0 and 1: it sees it from outside, and has its own.
    assert sub.rank_list == (0, 1)
    assert sub.get_coordinate() is None
    assert again["tp"].rank_list == (2, 3)
    assert sub["tp"] is sub
    with pytest.raises(ValueError, match="concatenate takes meshes that share a rank"):
        DeviceMesh.concatenate([again["dp"], sub])


def test_slices_of_a_mesh_seen_from_outside_lie_in_it(join: Join) -> None:
    join(0, 8)
    written = pickle.dumps(init_device_mesh("cpu", (2, 2, 2), ("pp", "dp", "tp"))["dp", "tp"])
    join(7, 8)
    sub = pickle.loads(written)
    assert sub.rank_list == (0, 1, 2, 3)
    assert sub["dp"].rank_list == (0, 2)
    assert sub["dp"].get_coordinate() is None


def test_a_mesh_unpickled_outside_of_a_job_says_that_it_knows_no_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"), _rank=1)
    again = pickle.loads(pickle.dumps(mesh))
    assert again == mesh
    assert again.get_coordinate() is None
    assert again["tp"].rank_list == (0, 1)
    with pytest.raises(
        RuntimeError, match="this process has no rank, so DeviceMesh.* cannot say anything about it"
    ):
        again.get_local_rank("tp")


def test_a_pickle_whose_flattened_name_means_other_dims_here_is_refused(join: Join) -> None:
    join(0, 4)
    mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
    mesh["dp"].flatten("x")
    written = pickle.dumps(mesh)
    join(1, 4)
    init_device_mesh("cpu", (2, 2), ("dp", "tp"))["tp"].flatten("x")
    with pytest.raises(ValueError, match=r"'x'.*flattened dims \(tp\), not \(dp\)"):
        pickle.loads(written)
