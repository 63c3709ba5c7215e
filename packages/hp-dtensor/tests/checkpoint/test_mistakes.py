"""A user's mistakes with checkpoints, each with its message: what was given, what was expected, what to change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import (
    Partial,
    Shard,
    async_save,
    distribute_tensor,
    load,
    load_safetensors,
    save,
    save_safetensors,
)
from hp_platform import collectives, init_device_mesh
from hp_platform.testing import World, distributed


def _zeros(w: World, *shape: int) -> Any:
    return w.platform.zeros(shape, "float32", w.device)


def _at(w: World, placement: Any) -> Any:
    return distribute_tensor(_zeros(w, 4), init_device_mesh(w.device_type, (w.size,)), [placement])


# Name -> (the call, the error's type, its text). ``p`` holds the checkpoint {"w": 4 zeros, "n": 1}.
CALLS: dict[str, tuple[Callable[[World, Path], Any], type[Exception], str]] = {
    "a tensor is no state": (
        lambda w, p: save(_zeros(w, 2), p),
        ValueError,
        r"a state is a dict or a list of .*; got a \w+: put it into a dict",
    ),
    "an object in a state": (
        lambda w, p: save({"a": {"b": object()}}, p),
        ValueError,
        "a/b is a object; a checkpoint holds tensors, bool, int, float, str, None",
    ),
    "a set in a state": (
        lambda w, p: async_save({"a": {1}}, p),
        ValueError,
        "a is a set; a checkpoint holds",
    ),
    "a key that is a tuple": (
        lambda w, p: save({"a": {(1, 2): 3}}, p),
        ValueError,
        r"a has the key \(1, 2\); keys of a checkpoint are strings or whole numbers",
    ),
    "a sum": (
        lambda w, p: save({"g": _at(w, Partial())}, p),
        ValueError,
        r"g has placements \(Partial\('sum'\),\): .* redistribute\(\) it to Shard or Replicate first",
    ),
    "a sum to load into": (lambda w, p: load({"w": _at(w, Partial())}, p), ValueError, "w has placements"),
    "a meta tensor": (
        lambda w, p: save({"w": w.platform.empty((2,), "float32", "meta")}, p),
        ValueError,
        "w is on the meta device and has no memory",
    ),
    "a dtype that the format lacks": (
        lambda w, p: save({"c": w.platform.zeros((2,), "complex128", "cpu")}, p),
        ValueError,
        "c is of dtype complex128, which safetensors does not know; it knows bool",
    ),
    "nothing to keep": (
        lambda w, p: save({}, p, keep=0),
        ValueError,
        "keep is how many .* stay, 1 or more.*got 0",
    ),
    "no time": (
        lambda w, p: save({}, p, timeout=0),
        ValueError,
        "timeout is a positive number of seconds, got 0",
    ),
    "no checkpoint": (
        lambda w, p: load({}, p.parent),
        ValueError,
        "there is no checkpoint in .*no latest, no index.json.*complete there: none",
    ),
    "no folder": (lambda w, p: load(p / "x"), ValueError, "x is no folder: check the path"),
    "no path": (
        lambda w, p: load({}),
        ValueError,
        r"load takes load\(path\), or load\(state, path\); got a dict",
    ),
    "like beside a state": (
        lambda w, p: load({"w": _zeros(w, 4), "n": 0}, p, like=lambda name, shape: None),
        ValueError,
        "fills the tensors that the state has: leave like out, or leave the state out",
    ),
    "like a plain tensor": (
        lambda w, p: load(p, like=lambda name, shape: _zeros(w, 4)),
        ValueError,
        r"like\('w', \(4,\)\) must give a DTensor of this shape or None, got ",
    ),
    "another shape": (
        lambda w, p: load({"w": _zeros(w, 5), "n": 0}, p),
        ValueError,
        r"1 mismatched: w \(shape \[4\] is stored, the state has \[5\]\). Make the state as it was saved",
    ),
    "an optimizer that has not stepped": (
        lambda w, p: load({"w": _zeros(w, 4)}, p),
        ValueError,
        "1 unexpected: n. .*strict=False",
    ),
    "a nested state for Hugging Face": (
        lambda w, p: save_safetensors({"model": {"w": _zeros(w, 2)}}, p),
        ValueError,
        "save_safetensors takes names and tensors only, got 'model': dict; save and load keep nested states",
    ),
    "nothing for Hugging Face": (
        lambda w, p: save_safetensors({}, p),
        ValueError,
        "at least one entry, got an empty dict",
    ),
    "a file of no bytes": (
        lambda w, p: save_safetensors({"w": _zeros(w, 2)}, p, max_shard_bytes=0),
        ValueError,
        "max_shard_bytes is a positive number of bytes, got 0",
    ),
    "a folder that is no model": (
        lambda w, p: load_safetensors({"w": _zeros(w, 2)}, p),
        ValueError,
        "has neither model.safetensors.index.json nor model.safetensors, and 0 other",
    ),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@distributed(world_size=(1, 2))
def test_wrong_calls_are_refused_on_every_rank(root: Path, world: World) -> None:
    save({"w": _zeros(world, 4), "n": 1}, root)
    for name, (call, kind, text) in CALLS.items():
        with pytest.raises(kind, match=text):
            call(world, root)
        assert sorted(entry.name for entry in root.iterdir()) == ["000001", "latest"], name
    assert load(root)["n"] == 1


@distributed(world_size=2)
def test_what_only_one_rank_does_wrong_is_told_to_the_others(root: Path, world: World) -> None:
    wrong = {"w": object()} if world.rank == 1 else {"w": 1}
    kind, text = (
        (ValueError, "w is a object") if world.rank == 1 else (RuntimeError, "rank 1 cannot take part")
    )
    for call in (save, async_save):
        with pytest.raises(kind, match=text):
            call(wrong, root)
    collectives.barrier()  # rank 0 has taken back the folder that it had made
    assert not list(root.iterdir())
    mine = {"w": _zeros(world, 2 + world.rank)}
    with pytest.raises(ValueError, match="rank 1 has other names, shapes or dtypes than rank 0"):
        save_safetensors(mine, root)
    kind, text = (
        (ValueError, "got 'w': int") if world.rank == 1 else (RuntimeError, "rank 1 cannot take part")
    )
    with pytest.raises(kind, match=text):
        save_safetensors({"w": 1 if world.rank == 1 else _zeros(world, 2)}, root)


@distributed(world_size=(1, 2))
def test_a_folder_that_has_a_model_is_not_written_to_again(root: Path, world: World) -> None:
    save_safetensors({"w": _zeros(world, 2)}, root)
    with pytest.raises(
        ValueError, match="has model.safetensors already, which loaders would mix .*another folder"
    ):
        save_safetensors({"w": _zeros(world, 2)}, root)


@distributed(world_size=1)
def test_damage_is_told_and_nothing_is_guessed(root: Path, world: World) -> None:
    mine = {"w": _zeros(world, 4)}
    folder = save(mine, root)
    part, index, pointer = folder / "rank-00000.safetensors", folder / "index.json", root / "latest"
    whole, text = part.read_bytes(), index.read_text()

    def refused(pattern: str) -> None:
        with pytest.raises(ValueError, match=pattern):
            load(mine, root)
        part.write_bytes(whole)
        index.write_text(text)
        pointer.write_text("000001\n")

    part.write_bytes(whole[:-1])
    refused(r"rank-00000.safetensors has \d+ bytes, expected \d+: it is damaged")
    part.write_bytes(whole.replace(b'"shape":[4]', b'"shape":[9]'))
    refused("describes|ends before the data of w")
    part.write_bytes(whole.replace(b'"w"', b'"v"'))
    refused("has None for w, expected F32 .4.: the file belongs to another checkpoint, or is damaged")
    part.unlink()
    refused("lacks rank-00000.safetensors, which its index names")
    index.write_text(text[:40])
    refused("index.json cannot be read .*: the checkpoint is damaged; load another one")
    index.write_text(text.replace('"chunks"', '"chunk"'))
    refused("index.json lacks a part .KeyError: 'chunks'.: the checkpoint is damaged; load another one")
    index.write_text("[]")
    refused("is not the index of a hp-dtensor checkpoint; for folders of other tools see load_safetensors")
    index.write_text(text.replace('"version": 1', '"version": 2'))
    refused("is of version 2, and this hp-dtensor reads version 1: install a later one")
    index.write_text(text.replace('"size": [4]', '"size": [3]'))
    refused("rank-00000.safetensors has Entry.* for w, expected F32 .3.")
    pointer.write_text("000007\n")
    refused(
        "latest names '000007', which is no complete checkpoint; complete there: 000001; incomplete: none; load "
    )
    pointer.write_text("")
    refused("latest names ''")
    load(mine, root)


@distributed(world_size=2)
def test_a_tensor_that_no_rank_has_whole_is_refused(root: Path, world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    x = distribute_tensor(_zeros(world, 4), mesh, [Shard(0)])
    state = {"w": x} if world.rank == 0 else {}
    with pytest.raises(
        ValueError, match=r"the ranks together do not hold the whole of w \[4\], only \[0\] \+ \[2\]"
    ):
        save(state, root)
    collectives.barrier()
    assert not list(root.iterdir())


@distributed(world_size=1, backends=("mindspore",))
def test_torchs_own_checkpoints_are_refused_where_there_is_no_torch(world: World) -> None:
    x = _at(world, Shard(0))
    for ask in (
        lambda: x.__create_write_items__("x", x),
        x.__create_chunk_list__,
        lambda: x.__get_tensor_shard__(None),
    ):
        with pytest.raises(
            NotImplementedError, match="torch.distributed.checkpoint of a DTensor .*use hp_dtensor.save"
        ):
            ask()
