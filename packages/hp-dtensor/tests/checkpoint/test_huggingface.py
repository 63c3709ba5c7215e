"""Folders in Hugging Face's layout: written for its tools, read from them; whole tensors outside, pieces inside."""

import importlib.util
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor, load_safetensors, save_safetensors
from hp_dtensor.checkpoint.growing_file import GrowingFile
from hp_dtensor.checkpoint.safetensors_file import TensorFile
from hp_platform import collectives, init_device_mesh
from hp_platform.testing import World, count_collectives, distributed


def _full(world: World, *shape: int, dtype: str = "float32") -> Any:
    numbers = [float(n) for n in range(1, 1 + math.prod(shape))]
    return world.platform.reshape(world.platform.tensor(numbers, dtype, world.device), shape)


def _state(world: World, *placements: Any, dtype: str = "float32") -> dict[str, Any]:
    mesh = init_device_mesh(world.device_type, (world.size,))
    shapes = {"layers.0.weight": (5, 4), "layers.0.bias": (5,), "layers.1.weight": (3, 5), "scale": (1,)}
    return {
        name: distribute_tensor(_full(world, *shape, dtype=dtype), mesh, [p if len(shape) > 1 else Shard(0)])
        for (name, shape), p in zip(shapes.items(), placements * 4, strict=False)
    }


def _bits(world: World, x: Any) -> bytes:
    return world.platform.to_bits(x.to_local()).tobytes()


@distributed(world_size=2)
def test_a_rank_that_cannot_write_gives_its_pieces_to_the_others_all_the_same(
    tmp_path: Path, world: World
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    state = _state(world, Shard(0), Shard(1))
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 0:
            patch.setattr(GrowingFile, "_append", full)
        error, text = (
            (OSError, "No space left") if world.rank == 0 else (RuntimeError, "rank-00000 could not save")
        )
        with pytest.raises(error, match=text):
            save_safetensors(state, tmp_path / "model", max_shard_bytes=64, timeout=20)
    collectives.barrier()
    save_safetensors(state, tmp_path / "other", max_shard_bytes=64)
    assert load_safetensors(state, tmp_path / "other").is_exact


@distributed(world_size=(1, 2, 4))
def test_a_sharded_model_becomes_one_file_and_comes_back_in_another_layout(
    tmp_path: Path, world: World
) -> None:
    state = _state(world, Shard(0), Shard(1))
    with count_collectives() as counted:
        assert save_safetensors(state, tmp_path / "model") == tmp_path / "model"
    # Each tensor is gathered; one all-gather tells that all ranks have the same names.
    counted.assert_counts(all_gather=5 if world.size > 1 else 0)
    assert [file.name for file in (tmp_path / "model").iterdir()] == ["model.safetensors"]
    file = TensorFile(tmp_path / "model" / "model.safetensors")
    assert file.metadata == {"format": "pt"}
    assert {key: entry.shape for key, entry in file.entries.items()} == {
        k: tuple(x.shape) for k, x in state.items()
    }
    for placement in (Shard(0), Shard(1), Replicate()):
        wanted = _state(world, placement)
        mine = {
            name: DTensor.from_local(x.to_local() * 0, x.device_mesh, x.placements, shape=x.shape)
            for name, x in wanted.items()
        }
        with count_collectives() as counted:
            report = load_safetensors(mine, tmp_path / "model")
        counted.assert_counts()
        assert report.is_exact
        for name, x in mine.items():
            assert _bits(world, x) == _bits(world, wanted[name]), name


@distributed(world_size=(1, 2))
def test_a_large_model_is_cut_into_files_that_the_index_names(tmp_path: Path, world: World) -> None:
    state = {**_state(world, Shard(1)), "plain": _full(world, 2, dtype="bfloat16")}
    save_safetensors(state, tmp_path, max_shard_bytes=81)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 80 + 20 + 60 + 4 + 4},
        "weight_map": {
            "layers.0.bias": "model-00002-of-00003.safetensors",
            "layers.0.weight": "model-00001-of-00003.safetensors",
            "layers.1.weight": "model-00002-of-00003.safetensors",
            "plain": "model-00003-of-00003.safetensors",
            "scale": "model-00003-of-00003.safetensors",
        },
    }
    assert len(list(tmp_path.glob("*"))) == 4
    zeros = {name: world.platform.zeros(tuple(x.shape), "float64", world.device) for name, x in state.items()}
    with pytest.raises(
        ValueError, match=r"plain \(dtype bfloat16 is stored, the state has float64; cast=True converts\)"
    ):
        load_safetensors(zeros, tmp_path)
    load_safetensors(zeros, tmp_path, cast=True)
    assert world.platform.to_numpy(zeros["plain"]).tolist() == [1.0, 2.0]
    assert world.platform.to_numpy(zeros["layers.1.weight"])[2].tolist() == [11.0, 12.0, 13.0, 14.0, 15.0]
    report = load_safetensors(
        {"scale": zeros["scale"], "new": zeros["plain"]}, tmp_path, strict=False, cast=True
    )
    assert report.missing == ("new",)
    assert len(report.unexpected) == 4
    # A single file of the folder is read by its path.
    one = tmp_path / "model-00003-of-00003.safetensors"
    assert load_safetensors({"scale": zeros["scale"]}, one, strict=False, cast=True).unexpected == ("plain",)


@distributed(world_size=1, backends=("torch", "mindspore"))
def test_the_files_are_what_the_safetensors_package_reads_and_writes(tmp_path: Path, world: World) -> None:
    if importlib.util.find_spec("safetensors") is None:
        pytest.skip("the package safetensors is not installed")
    from safetensors.numpy import load_file, save_file

    state = {
        "a.b": _full(world, 3, 2),
        "c": _full(world, 2, dtype="float16"),
        "d": _full(world, dtype="float64"),
    }
    save_safetensors(state, tmp_path / "ours")
    read = load_file(tmp_path / "ours" / "model.safetensors")
    assert {name: array.tolist() for name, array in read.items()} == {
        "a.b": [[1, 2], [3, 4], [5, 6]], "c": [1, 2], "d": 1,
    }  # fmt: skip
    save_file(read, tmp_path / "theirs.safetensors")
    mine = {name: world.platform.zeros_like(x) for name, x in state.items()}
    assert load_safetensors(mine, tmp_path / "theirs.safetensors").is_exact
    for name, x in mine.items():
        assert world.platform.to_numpy(x).tolist() == read[name].tolist()


def _file(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


BROKEN = {
    "no length": (
        lambda path: path.write_bytes(b"PK\x03"),
        r"\(3 bytes\) does not begin like a safetensors file",
    ),
    "a length beyond the end": (
        lambda path: path.write_bytes(struct.pack("<Q", 99) + b"{}"),
        "does not begin like",
    ),
    "no JSON": (lambda path: _file(path, b"{nonsense"), "the header of .* is no JSON"),
    "a list": (lambda path: _file(path, b"[1, 2]"), "is a list, expected names"),
    "an unknown dtype": (
        lambda path: _file(path, b'{"x":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}}', b"1"),
        "describes x as .* which cannot be read .* or of a dtype other than BOOL",
    ),
    "data that end early": (
        lambda path: _file(path, b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"1234"),
        "ends before the data of x",
    ),
    "offsets that do not fit the shape": (
        lambda path: _file(path, b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', b"1234"),
        "ends before the data of x",
    ),
}


@pytest.mark.once
@pytest.mark.parametrize("case", BROKEN)
def test_a_damaged_file_is_told_before_anything_is_read(case: str, tmp_path: Path) -> None:
    write, text = BROKEN[case]
    write(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=text):
        TensorFile(tmp_path / "model.safetensors")
