"""The trainer's sharded checkpoints: any number of processes reads those of any other; nothing half is ever read."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hp_dtensor.chunk import chunk_offset, chunk_size
from hyper_parallel.trainer import checkpoint
from hyper_parallel.trainer.errors import UsageError

pytestmark = pytest.mark.once

SHAPES = {"seven": (7, 2), "one": (1, 3), "vector": (5,)}
IDENTITY = {"size": {"dim": 4}, "dtype": "float32"}


def whole(name: str) -> np.ndarray:
    return np.arange(np.prod(SHAPES[name]), dtype=np.float32).reshape(SHAPES[name])


def cut(name: str, rank: int, nproc: int) -> np.ndarray:
    start = chunk_offset(SHAPES[name][0], nproc, rank)
    return whole(name)[start : start + chunk_size(SHAPES[name][0], nproc, rank)]


def save(root: Path, nproc: int, step: int = 3) -> None:
    """All ranks, as threads."""
    meeting = threading.Barrier(nproc)

    def one(rank: int) -> Path:
        parts = {name: cut(name, rank, nproc) for name in SHAPES}
        return checkpoint.save(
            root,
            step=step,
            rank=rank,
            nproc=nproc,
            parts=parts,
            shapes=SHAPES,
            identity=IDENTITY,
            barrier=lambda: meeting.wait(30),
        )

    with ThreadPoolExecutor(nproc) as threads:
        assert set(threads.map(one, range(nproc))) == {root / f"step-{step:06d}"}


@pytest.mark.parametrize("saved_by", [1, 2, 3, 4])
@pytest.mark.parametrize("read_by", [1, 2, 3, 5, 8])
def test_any_number_of_processes_reads_any_others(tmp_path: Path, saved_by: int, read_by: int) -> None:
    save(tmp_path, saved_by)
    found = checkpoint.find(tmp_path)
    assert (found.step, found.nproc, found.identity) == (3, saved_by, IDENTITY)
    for name, shape in SHAPES.items():
        for rank in range(read_by):
            np.testing.assert_array_equal(
                checkpoint.load_rows(found, name, shape, rank, read_by), cut(name, rank, read_by)
            )


def test_the_newest_is_found_and_a_half_one_beside_it_is_not_read(tmp_path: Path) -> None:
    save(tmp_path, 2, step=3)
    save(tmp_path, 2, step=6)
    (tmp_path / "step-000009.partial").mkdir()
    (tmp_path / "newest.partial").write_text("step-000009\n")
    assert checkpoint.find(tmp_path).step == 6


def test_a_second_save_of_the_same_step_replaces_the_first(tmp_path: Path) -> None:
    save(tmp_path, 4)
    save(tmp_path, 1)
    assert checkpoint.find(tmp_path).nproc == 1
    assert len(list((tmp_path / "step-000003").iterdir())) == 2


def test_a_save_of_the_same_step_that_is_killed_between_its_renames_leaves_the_earlier_one(
    tmp_path: Path,
) -> None:
    save(tmp_path, 2)
    (tmp_path / "step-000003").rename(tmp_path / "step-000003.replaced")
    found = checkpoint.find(tmp_path)
    np.testing.assert_array_equal(checkpoint.load_rows(found, "seven", (7, 2), 0, 1), whole("seven"))
    save(tmp_path, 4)  # goes on as if nothing had happened
    assert checkpoint.find(tmp_path).nproc == 4
    assert not (tmp_path / "step-000003.replaced").exists()


def test_what_cannot_be_read_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="--resume: there is no checkpoint in .*; train without --resume first"
    ):
        checkpoint.find(tmp_path)
    save(tmp_path, 2)
    part = tmp_path / "step-000003" / "shard-00001-of-00002.safetensors"
    kept = part.read_bytes()
    part.unlink()
    with pytest.raises(
        UsageError, match="lacks shard-00001-of-00002.safetensors: the checkpoint is incomplete"
    ):
        checkpoint.find(tmp_path)
    part.write_bytes(kept)
    (tmp_path / "step-000003" / "index.json").write_text("{")
    with pytest.raises(UsageError, match="is damaged"):
        checkpoint.find(tmp_path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("newest", b""),
        ("newest", b"step-000009\n"),
        ("newest", b"\xff\xfe"),
        ("step-000003/index.json", b"[]"),
        ("step-000003/index.json", b"\xff"),
        ("step-000003/index.json", b'{"step": "3", "nproc": 2, "identity": {}, "shapes": {}}'),
        ("step-000003/index.json", b'{"step": 3, "nproc": "2", "identity": {}, "shapes": {}}'),
        ("step-000003/index.json", b'{"step": 3, "nproc": 2, "identity": {}, "shapes": {"absent": [3]}}'),
        ("step-000003/index.json", b'{"step": 3, "nproc": 2, "identity": {}, "shapes": {"seven": [9, 2]}}'),
        ("step-000003/shard-00001-of-00002.safetensors", b""),
        ("step-000003/shard-00001-of-00002.safetensors", b"\0" * 100),
        ("step-000003/shard-00001-of-00002.safetensors", None),  # cut short
    ],
)
def test_damage_is_found_before_a_process_starts(tmp_path: Path, file: str, content: bytes | None) -> None:
    save(tmp_path, 2)
    broken = tmp_path / file
    broken.write_bytes(broken.read_bytes()[:-4] if content is None else content)
    with pytest.raises(UsageError, match="--resume: .* is damaged .*; write the name of an earlier") as told:
        checkpoint.find(tmp_path)
    assert "\n" not in str(told.value)
