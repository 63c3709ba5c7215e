"""The trainer's checkpoints in one process; what several processes do with them stands in the integration tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hp_dtensor
from hp_platform import get_platform
from hyper_parallel.trainer import checkpoint
from hyper_parallel.trainer.errors import UsageError

pytestmark = pytest.mark.once

IDENTITY = {"size": {"dim": 4}, "dtype": "float32", "optimizer": "adamw"}


def tensors(value: float) -> dict[str, dict[str, Any]]:
    return {
        part: {"w": get_platform().full((3, 2), value, get_platform().dtype("float32"))}
        for part in ("model", "optimizer", "schedule")
    }


def save(root: Path, step: int) -> Path:
    return checkpoint.save(root, step=step, identity=IDENTITY, parts=tensors(float(step)))


def test_the_newest_is_found_and_loaded_and_an_unfinished_one_beside_it_is_not_read(tmp_path: Path) -> None:
    save(tmp_path, 3)
    save(tmp_path, 6)
    (tmp_path / "000009").mkdir()
    found = checkpoint.find(tmp_path, IDENTITY)
    assert (found.step, found.identity) == (6, IDENTITY)
    parts = checkpoint.load(found)
    assert set(parts) == {"run", "model", "optimizer", "schedule"}
    assert all(float(parts[part]["w"].sum()) == 36.0 for part in ("model", "optimizer", "schedule"))


def test_it_says_of_which_model_it_is(tmp_path: Path) -> None:
    save(tmp_path, 3)
    assert (
        checkpoint.find(tmp_path, {"size": {"dim": 8}, "dtype": "float64", "optimizer": "muon"}).identity
        == IDENTITY
    )


def test_three_stay(tmp_path: Path) -> None:
    for step in range(5):
        save(tmp_path, step)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["000003", "000004", "000005", "latest"]


def test_a_state_of_another_program_is_refused(tmp_path: Path) -> None:
    hp_dtensor.save({"epoch": 3}, tmp_path)
    with pytest.raises(
        UsageError, match="is no checkpoint of this program: it lacks run/step, run/identity/size/dim"
    ):
        checkpoint.find(tmp_path, IDENTITY)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("latest", b""),
        ("latest", b"000009\n"),
        ("latest", b"\xff\xfe"),
        ("000001/index.json", b"[]"),
        ("000001/index.json", b"{"),
        ("000001/index.json", b"\xff"),
        ("000001/rank-00000.safetensors", b""),
        ("000001/rank-00000.safetensors", b"\0" * 100),
        ("000001/rank-00000.safetensors", None),  # cut short
    ],
)
def test_damage_is_told_in_a_line(tmp_path: Path, file: str, content: bytes | None) -> None:
    save(tmp_path, 3)
    broken = tmp_path / file
    broken.write_bytes(broken.read_bytes()[:-4] if content is None else content)
    with pytest.raises(UsageError, match="^--resume: .*; or train without --resume$") as told:
        checkpoint.load(checkpoint.find(tmp_path, IDENTITY))
    assert "\n" not in str(told.value)


def test_nothing_to_resume_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="^--resume: there is no checkpoint in .*; or train without"):
        checkpoint.find(tmp_path, IDENTITY)
