"""What a state may hold, what comes back, and how a state and a checkpoint that differ are told."""

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor import Replicate, Shard, distribute_tensor, load, save
from hp_dtensor.checkpoint import nest, sources
from hp_dtensor.checkpoint.safetensors_file import CODE_OF, TensorFile
from hp_platform import collectives, init_device_mesh
from hp_platform.testing import World, distributed


def _bits(world: World, x: Any) -> Any:
    return world.platform.to_bits(getattr(x, "to_local", lambda: x)())


def _zeros(world: World, *shape: int, dtype: str = "float32") -> Any:
    return world.platform.zeros(shape, dtype, world.device)


NAMES = {
    "a.b": 1,
    "a/b": 2,
    "a~1b": 3,
    "~": 4,
    "": 5,
    "a": {"b": 6, "": 7},
    0: 8,
    "0": 9,
    "~i0": 10,
    -3: 11,
    "ä\n": 12,
}


@distributed(world_size=(1, 2))
def test_values_names_and_kinds_of_containers_come_back_as_they_were(tmp_path: Path, world: World) -> None:
    state = {
        "names": NAMES,
        "lists": [[], [1, [2.5, None]], {}, (), (3, ("x",))],
        "numbers": [0.1, 1e300, -0.0, float("inf"), 2**80, True, False, 1],
        "text": "line\n\u20ac\U0001f600",
    }
    save(state, tmp_path)
    back = load(tmp_path)
    assert back == state
    assert [type(x) for x in back["numbers"]] == [type(x) for x in state["numbers"]]
    assert math.copysign(1, back["numbers"][2]) == -1
    assert save([1, [2]], tmp_path / "list") and load(tmp_path / "list") == [1, [2]]


@pytest.mark.once
def test_every_name_leads_back_to_its_own_place() -> None:
    flat = nest.flatten(NAMES, lambda x: False)
    assert len(flat.leaves) == 12
    back = nest.rebuild(flat.root, flat.kinds, {name: leaf.value for name, leaf in flat.leaves.items()})
    assert back == NAMES
    assert {"a.b", "a~1b", "a~01b", "~0", "", "a/b", "a/", "~i0", "0", "~0i0", "~i-3", "ä\n"} == set(
        flat.leaves
    )


@distributed(world_size=1)
def test_every_dtype_of_the_framework_comes_back_bit_by_bit(tmp_path: Path, world: World) -> None:
    platform, state, wanted = world.platform, {}, {}
    lacking = []
    for name in CODE_OF:
        try:
            platform.dtype(name)
        except ValueError:
            lacking.append(name)
            continue
        width = platform.itemsize(name)
        bits = np.arange(6, dtype=f"u{width}").reshape(3, 2) & (1 if name == "bool" else 255)
        for shape in ((3, 2), (), (0, 2)):
            part = bits.reshape(-1)[: math.prod(shape)].reshape(shape).copy()
            state[f"{name} {shape}"] = platform.from_bits(part.copy(), name, "cpu")
            wanted[f"{name} {shape}"] = (name, part)
    assert all(name.startswith("float8") for name in lacking), lacking
    folder = save(state, tmp_path)
    back = load(tmp_path)
    assert list(back) == list(state)
    for key, (name, part) in wanted.items():
        assert (platform.dtype_name(back[key].dtype), tuple(back[key].shape)) == (name, part.shape)
        assert platform.to_bits(back[key]).tobytes() == part.tobytes(), key
    # Wider elements first, so that each begins at a multiple of its width.
    file = TensorFile(folder / "rank-00000.safetensors")
    for key in file.entries:
        bits = file.bits(key)
        assert bits.ctypes.data % bits.itemsize == 0


@distributed(world_size=(1, 2))
def test_a_load_fills_the_very_tensors_and_containers_of_the_state(tmp_path: Path, world: World) -> None:
    platform = world.platform
    mesh = init_device_mesh(world.device_type, (world.size,))
    full = platform.reshape(platform.arange(0, 15, "float32", world.device), (5, 3))
    state = {
        "w": distribute_tensor(full, mesh, [Shard(0)]),
        "b": platform.cast(full, "float32") + 1,
        "step": 7,
        "s": ["x"],
    }
    save(state, tmp_path)
    weight = distribute_tensor(platform.set_requires_grad_(platform.zeros_like(full), True), mesh, [Shard(1)])
    local, bias, names = weight.to_local(), platform.transpose(_zeros(world, 3, 5), 0, 1), ["old"]
    mine = {"w": weight, "b": bias, "step": 0, "s": names}
    report = load(mine, tmp_path)
    assert report.is_exact and str(report) == f"{tmp_path / '000001'}: exact"
    assert (mine["step"], names) == (7, ["x"])
    assert mine["w"] is weight and weight.to_local() is local and platform.requires_grad(local)
    wanted = distribute_tensor(full, mesh, [Shard(1)])
    assert _bits(world, weight).tobytes() == _bits(world, wanted).tobytes()
    assert _bits(world, bias).tobytes() == _bits(world, full + 1).tobytes()


@distributed(world_size=(1, 2))
def test_differences_are_told_before_anything_changes_and_left_out_without_strict(
    tmp_path: Path, world: World
) -> None:
    ones = _zeros(world, 3) + 1
    save(
        {"same": ones, "only_stored": 1, "shape": ones, "dtype": ones, "kind": 1, "other": ones, "t": (1, 2)},
        tmp_path,
    )
    mine = {
        "same": _zeros(world, 3),
        "only_mine": _zeros(world, 3),
        "shape": _zeros(world, 4),
        "dtype": _zeros(world, 3, dtype="float16"),
        "kind": _zeros(world, 3),
        "other": 5,
        "t": (1, 3),
    }
    with pytest.raises(ValueError, match="do not fit, and nothing was changed") as caught:
        load(mine, tmp_path)
    assert _bits(world, mine["same"]).any() == np.False_
    told = str(caught.value)
    for part in (
        "1 missing: only_mine",
        "1 unexpected: only_stored",
        "5 mismatched",
        "shape (shape [3] is stored, the state has [4])",
        "dtype (dtype float32 is stored, the state has float16; cast=True converts)",
        "kind (a value is stored, the state has a tensor)",
        "other (a tensor is stored, the state has a value)",
        "t/1 (2 is stored, and a tuple cannot take it in place of 3)",
        "strict=False",
    ):
        assert part in told, part
    report = load(mine, tmp_path, strict=False)
    assert (report.missing, report.unexpected, report.is_exact) == (("only_mine",), ("only_stored",), False)
    assert [text.split()[0] for text in report.mismatched] == ["shape", "dtype", "kind", "other", "t/1"]
    assert _bits(world, mine["same"]).tobytes() == _bits(world, ones).tobytes()
    assert not _bits(world, mine["dtype"]).any()
    assert mine["other"] == 5
    load(mine, tmp_path, strict=False, cast=True)
    assert world.platform.to_numpy(mine["dtype"]).tolist() == [1.0, 1.0, 1.0]


@distributed(world_size=2)
def test_ranks_may_have_different_names_and_only_equal_values_under_one(tmp_path: Path, world: World) -> None:
    mine = _zeros(world, 2) + world.rank
    save({"stages": {str(world.rank): mine}, "step": 3, f"own{world.rank}": [world.rank]}, tmp_path)
    back = load(tmp_path)
    assert sorted(back) == ["own0", "own1", "stages", "step"]
    assert [world.platform.to_numpy(back["stages"][str(r)]).tolist() for r in range(2)] == [[0, 0], [1, 1]]
    assert back["own1"] == [1]
    for state, text in (
        ({"step": world.rank}, r"step differs between ranks: value \[0\] on rank 0, \[1\] on rank 1"),
        ({"x": _zeros(world, 2 + world.rank)}, "x differs between ranks: dtype and shape"),
        (
            {"x": mine if world.rank else 1},
            "x is a tensor on one of the ranks 0 and 1 and a value on the other",
        ),
        ({"x": [1] if world.rank else (1,)}, "x differs between ranks: kind tuple on rank 0, list on rank 1"),
        ({"x": {"y": 1} if world.rank else 1}, "x is a tensor or a value on rank 0 and holds further names"),
    ):
        with pytest.raises(ValueError, match=text):
            save(state, tmp_path)
    collectives.barrier()  # rank 0 has taken back the folders that it had made
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["000001", "latest"]


@distributed(world_size=(1, 2))
def test_tensors_go_through_the_host_by_small_parts_and_only_the_own_ones(
    tmp_path: Path, world: World
) -> None:
    platform, sizes = world.platform, []
    mesh = init_device_mesh(world.device_type, (world.size,))
    x = distribute_tensor(_zeros(world, 64, 32) + 1, mesh, [Shard(0)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE_BYTES", 1024)
        usual = platform.to_bits
        patch.setattr(
            type(platform), "to_bits", lambda self, x: sizes.append(4 * math.prod(x.shape)) or usual(x)
        )
        save({"x": x}, tmp_path)
    assert max(sizes) == 1024
    assert sum(sizes) == 4 * 64 * 32 // world.size


@distributed(world_size=2)
def test_a_load_keeps_no_more_than_one_local_piece_in_memory(tmp_path: Path, world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    rows, columns = 4096, 64  # a megabyte
    names = [f"w{i}" for i in range(4)]
    save({n: distribute_tensor(_zeros(world, rows, columns), mesh, [Shard(1)]) for n in names}, tmp_path)
    mine = {n: distribute_tensor(_zeros(world, rows, columns), mesh, [Shard(0)]) for n in names}
    load(mine, tmp_path)  # imports and the like
    tracemalloc.start()
    try:
        load(mine, tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    piece = 4 * rows * columns // 2
    assert peak < 1.5 * piece, (peak, piece)


@distributed(world_size=1)
def test_a_parameter_of_a_module_is_filled_in_place(tmp_path: Path, world: World) -> None:
    platform = world.platform
    x = platform.parameter(_zeros(world, 3) + 2)
    save({"x": x}, tmp_path)
    y = platform.parameter(_zeros(world, 3))
    load({"x": y}, tmp_path)
    assert platform.to_numpy(y).tolist() == [2.0, 2.0, 2.0]
    assert platform.requires_grad(y)


@distributed(world_size=1)
def test_the_index_says_in_json_what_lies_where(tmp_path: Path, world: World) -> None:
    folder = save({"w": _zeros(world, 2, 3), "n": 1}, tmp_path)
    assert json.loads((folder / "index.json").read_text()) == {
        "format": "hp-dtensor checkpoint",
        "version": 1,
        "files": {"rank-00000.safetensors": 8 + 64 + 24},
        "root": "dict",
        "kinds": {},
        "entries": {
            "w": {
                "dtype": "F32",
                "shape": [2, 3],
                "chunks": [{"file": "rank-00000.safetensors", "key": "w", "offset": [0, 0], "size": [2, 3]}],
            },
            "n": {"value": 1},
        },
    }


@distributed(world_size=2)
def test_replicas_of_meshes_that_are_rows_of_a_larger_one_are_written_once(
    tmp_path: Path, world: World
) -> None:
    mesh = init_device_mesh(world.device_type, (2, 1), mesh_dim_names=("dp", "tp"))
    x = distribute_tensor(_zeros(world, 4, 4), mesh["tp"], [Replicate()])
    folder = save({"x": x}, tmp_path)
    files = sorted(folder.glob("*.safetensors"))
    assert sum("x" in TensorFile(file).entries for file in files) == 1
