"""`bench optim` as it runs: a tiny model, on processes of the host."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench.cases import optim
from bench.cases.optim_measured import Course, Measured, bytes_in_theory
from bench.cases.optim_settings import Setting, Side
from bench.conditions import Conditions
from bench.models.sizes import SIZES

pytestmark = pytest.mark.once  # the sides are programs of torch

CONDITIONS = Conditions("4 GPUs of a test", {"torch": "2.11.0"}, "0123456789ab")
TINY = Setting("tiny", SIZES["tiny"])
ELEMENTS = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)


def test_every_element_is_sent_once_there_and_once_back_but_for_those_that_are_there() -> None:
    assert bytes_in_theory(TINY, 1) == 0
    for ranks in (2, 4):
        assert bytes_in_theory(TINY, ranks) * ranks == 2 * 2 * ELEMENTS * (ranks - 1) // ranks
    # Of two replicas one gives what its other rank has; the owner's results go to three shards.
    replicated = Setting("tiny", SIZES["tiny"], replicas=2)
    assert bytes_in_theory(replicated, 4) * 4 == 2 * (ELEMENTS // 2 + 3 * ELEMENTS // 2)


def test_the_sides_take_turns_once_they_are_known_to_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def on_ranks(num_ranks: int, function: Any, *args: Any) -> list[Any]:
        calls.append(args[0].name if function is optim.measure else function.__name__)
        return [Measured(1.0) if function is optim.measure else 0.5] * num_ranks

    monkeypatch.setattr(optim, "on_ranks", on_ranks)
    found = optim.run(TINY, 2, Course(rounds=2), CONDITIONS)
    assert calls == ["compare", *["OURS", "LIMIT", "ITERATIONS", "PEER", "ADAMW"] * 2]
    assert found.apart == 0.5
    assert found.of(Side.LIMIT) == 1.0


def test_a_tiny_model_is_measured_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optim, "num_gpus", lambda: 0)
    file = tmp_path / "rows.jsonl"
    arguments = [
        "--ranks",
        "2",
        "--rounds",
        "1",
        "--warm",
        "1",
        "--steps",
        "1",
        "--layers",
        "1",
        "--json",
        str(file),
    ]
    assert main(["optim", "1b", *arguments]) in (
        0,
        1,
    )  # times of a tiny model on a processor reach nothing, or do
    (values,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert values["case"] == "optim tiny-for-1b-layers1"
    assert values["goals"]["sent <= 1.01 x theory"] is True
    assert values["sides"]["Muon"]["sent_bytes"] > 0
    assert set(values["sides"]["Muon"]["launches"]) == {"all_to_all"}
    assert 0 < values["apart"] < 0.1
    assert capsys.readouterr().out.splitlines()[-1].startswith("| tiny-for-1b-layers1 | 2 |")
