"""`bench tp-overlap` as it runs: small, on processes of the host."""

import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.cases import tp_overlap
from bench.cases.tp_overlap_sides import SIDES

pytestmark = pytest.mark.once  # the ranks are processes of torch on cpu


def test_without_gpus_two_processes_run_a_tiny_layer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tp_overlap, "num_gpus", lambda: 0)
    monkeypatch.setattr(tp_overlap, "GOAL", 1e9)  # times on a busy host are not what is tested
    options = ["--ranks", "2", "--rounds", "1", "--steps", "1", "--json", str(tmp_path / "rows")]
    assert main(["tp-overlap", "qkv-512", "down-512-forward", *options]) == 0
    assert "| tiny-qkv-512 | 2 |" in capsys.readouterr().out
    found = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [each["case"] for each in found] == ["tp-overlap tiny-qkv-512", "tp-overlap tiny-down-512-forward"]
    assert all(each["sides"][side]["milliseconds"] > 0 for each in found for side in SIDES)
