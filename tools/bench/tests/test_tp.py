"""The rows of `bench tp`: which are chosen, what is compared, and what a row says."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench.cases import tp
from bench.cases.tp_measured import Compared, Course, Measured, slowest
from bench.cases.tp_row import HEADER, Row
from bench.cases.tp_settings import SETTINGS, Setting, Side
from bench.conditions import Conditions
from bench.profiles import Kind, Profile

CONDITIONS = Conditions("4 GPUs of a test", {"torch": "2.11.0"}, "0123456789ab")
MIB = 2**20


def measured(milliseconds: float, peak: int | None = None, exposed: float | None = None) -> Measured:
    profile = None if exposed is None else Profile(9.0, dict.fromkeys(Kind, 1.0), exposed=exposed, idle=0.25)
    return Measured(milliseconds, peak, profile)


def row(name: str, ours: Measured, peer: Measured, limit: Measured | None = None) -> Row:
    sides = {Side.OURS: ours, Side.PEER: peer, Side.LIMIT: limit or measured(1.0)}
    return Row(SETTINGS[name], 4, Compared(sides, 1e-3), 3, CONDITIONS)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tp, "num_gpus", lambda: 8)


def test_there_is_a_row_for_every_part_length_and_way_to_run_it() -> None:
    lengths = (512, 2048, 4096)
    names = [
        f"{part}{cut}{compiled}"
        for part in ("layer", "model")
        for cut in ("-sp", "")
        for compiled in ("-compiled", "")
    ]
    assert set(SETTINGS) == {
        f"{name}-{length}" for name in (*names, "layer-sp-overlap", "loss") for length in lengths
    }


@pytest.mark.usefixtures("gpus")
def test_patterns_choose_rows() -> None:
    assert [s.name for s in tp.chosen(["layer-[0-9]*"], 4)] == ["layer-512", "layer-2048", "layer-4096"]
    assert len(tp.chosen([], 8)) == len(SETTINGS)
    with pytest.raises(ValueError, match="no row is named block-512; the rows are: layer-sp-512, "):
        tp.chosen(["layer-*", "block-512"], 4)
    with pytest.raises(
        ValueError, match="8 heads of keys and values cannot be dealt to 3 ranks: give a divisor"
    ):
        tp.chosen(["layer-*"], 3)


def test_without_gpus_the_sizes_are_tiny_and_the_name_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tp, "num_gpus", lambda: 0)
    (setting,) = tp.chosen(["model-sp-compiled-4096"], 2)
    assert setting.name == "tiny-model-sp-compiled-128"
    assert (setting.family.sizes.dim, setting.family.sequence_parallel, setting.family.compiled) == (
        64,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("name", "goal"),
    [
        ("layer-512", 1.2),
        ("model-sp-2048", 1.2),
        ("layer-4096", 1.0),
        ("layer-sp-compiled-512", 1.0),
        ("model-compiled-2048", 1.0),
        ("loss-512", None),
    ],
)
def test_short_eager_rows_are_to_be_faster_and_the_others_no_slower(name: str, goal: float | None) -> None:
    assert SETTINGS[name].goal_of_peer == goal


@pytest.mark.parametrize(
    ("ours", "peer", "goals"),
    [
        (measured(10.0), measured(12.0), (True, None, None)),
        (measured(10.0), measured(11.9), (False, None, None)),
        (measured(10.0, MIB, 0.5), measured(12.0, MIB, 0.5), (True, True, True)),
        (measured(10.0, MIB + 1, 0.5), measured(12.0, MIB, 0.5), (True, False, True)),
        (measured(10.0, MIB, 0.6), measured(12.0, MIB, 0.5), (True, True, False)),
    ],
)
def test_a_row_says_of_every_goal_whether_it_is_reached(
    ours: Measured, peer: Measured, goals: tuple[bool | None, ...]
) -> None:
    found = row("layer-512", ours, peer)
    assert tuple(found.goals.values()) == goals
    assert found.reached is (False not in goals)


def test_the_loss_is_to_take_less_memory_than_with_the_logits_held() -> None:
    held = measured(10.0, 2 * MIB)
    assert row("loss-512", measured(11.0, MIB), held, held).reached
    assert not row("loss-512", measured(9.0, 2 * MIB), held, held).reached


def test_a_row_as_a_table_and_as_json() -> None:
    found = row(
        "layer-2048",
        measured(5.0, 300 * MIB, 0.5),
        measured(7.5, 400 * MIB, 0.75),
        measured(4.0, 200 * MIB, 0.4),
    )
    line = found.to_table_row()
    assert line.count("|") == HEADER.splitlines()[0].count("|") == HEADER.splitlines()[1].count("|")
    start = "| layer-2048 | 4 | 5.000 | 7.500 | 4.000 | 1.500 | 0.800 | 300.0 | 400.0 | 200.0 | 0.50 | 0.75 | 0.40 |"
    assert line.startswith(start)
    assert "| yes, yes, yes |" in line
    values = json.loads(found.to_json())
    assert (values["case"], values["of_peer"], values["of_limit"]) == ("tp layer-2048", 1.5, 0.8)
    assert values["sides"]["ours"]["profile"]["busy"]["matmul"] == 1.0
    assert "| not measured" not in line
    assert "yes, not measured, not measured" in row("layer-512", measured(1.0), measured(2.0)).to_table_row()


def test_the_slowest_rank_and_the_largest_peak_count() -> None:
    first = Compared({side: measured(1.0, 7, 0.5) for side in Side}, 1e-3)
    second = Compared({side: measured(2.0, 5, 0.7) for side in Side}, 2e-3)
    found = slowest([first, second])
    assert found.apart == 2e-3
    assert found.sides[Side.OURS].milliseconds == 2.0
    assert found.sides[Side.OURS].peak_bytes == 7
    assert found.sides[Side.OURS].profile == first.sides[Side.OURS].profile


def on_every_rank(num_ranks: int, function: Any, settings: Sequence[Setting], course: Course) -> list[Any]:
    """In place of processes: ours is 1.5 times as fast; what is compiled fails."""
    if settings[0].family.compiled:
        raise RuntimeError("no compiler here")
    sides = {Side.OURS: measured(10.0), Side.PEER: measured(15.0), Side.LIMIT: measured(9.0)}
    return [[Compared(sides, 1e-3)] * len(settings)] * num_ranks


@pytest.mark.usefixtures("gpus")
def test_the_command_runs_families_and_goes_on_behind_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tp, "on_ranks", on_every_rank)
    file = tmp_path / "rows.jsonl"
    assert main(["tp", "layer-512", "layer-2048", "--ranks", "4", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == file.read_text().splitlines()
    assert [line.split()[1] for line in lines[-2:]] == ["layer-512", "layer-2048"]
    assert main(["tp", "layer-compiled-512", "model-512", "--ranks", "4"]) == 1
    captured = capsys.readouterr()
    assert "no compiler here" in captured.err
    assert captured.out.splitlines()[-1].startswith("| model-512 |")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["block"], "no row is named block"),
        (["--ranks", "3"], "cannot be dealt to 3 ranks"),
        (["--rounds", "0"], "0 is less than 1"),
    ],
)
def test_a_wrong_call_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["tp", *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_the_rows_are_listed_without_running(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tp", "--list", "--ranks", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(SETTINGS)
