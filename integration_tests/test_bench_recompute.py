"""`bench recompute` as it runs: tiny layers, on the host."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench.cases import recompute, recompute_measured
from bench.cases.recompute_settings import ON_HOST, Side

pytestmark = pytest.mark.once  # the sides are programs of torch


def test_a_side_that_computes_something_else_makes_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.cases import recompute_sides  # needs torch, which other backends' environments may lack

    own = recompute_sides._wrapped

    def wrapped(block: Any, side: Side) -> Any:
        layer = own(block, side)
        return (lambda *args: layer(*args) * 2) if side is Side.FULL else layer

    monkeypatch.setattr(recompute_sides, "_wrapped", wrapped)
    with pytest.raises(RuntimeError, match="do not compute the same: checkpoint differs from plain by"):
        recompute_measured._compared([Side.TORCH_FULL, Side.FULL], ON_HOST, "cpu")


def test_all_sides_compute_the_same_bits_on_a_processor() -> None:
    apart = recompute_measured._compared(list(Side), ON_HOST, "cpu")
    assert apart == dict.fromkeys(Side, 0.0)


def test_tiny_layers_are_measured_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "num_gpus", lambda: 0)
    file = tmp_path / "rows.jsonl"
    arguments = ["--layers", "2", "--rounds", "1", "--warm", "1", "--steps", "1", "--json", str(file)]
    # Times of tiny layers on a processor reach nothing, or do.
    assert main(["recompute", "full", "sel*", *arguments]) in (0, 1)
    values = [json.loads(line) for line in file.read_text().splitlines()]
    assert [each["case"] for each in values] == ["recompute full", "recompute selective"]
    assert all(each["share"]["saved_bytes"] > 0 for each in values)
    assert capsys.readouterr().out.splitlines()[-1].startswith("| selective |")
