"""The rows of `bench fsdp`: which are chosen, what is compared, and what a row says."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench.cases import fsdp
from bench.cases.fsdp import chosen, compare, slowest
from bench.cases.fsdp_measured import Measured, OnTheHost, Steps
from bench.cases.fsdp_row import HEADER, PROFILE_HEADER, ProfileRow, Row
from bench.cases.fsdp_settings import SETTINGS, Setting
from bench.cases.fsdp_training import Side
from bench.conditions import Conditions
from bench.profiles import Kind, Profile

CONDITIONS = Conditions("4 GPUs of a test", {"torch": "2.11.0"}, "0123456789ab")
GIB = 2**30


def row(
    ours: float, peer: float, limit: float, name: str = "1b-batch2", peaks: tuple[Any, Any] = (GIB, 2 * GIB)
) -> Row:
    sides = {
        Side.OURS: Measured(ours, peaks[0], (1.0,)),
        Side.PEER: Measured(peer, peaks[1], (1.0,)),
        Side.LIMIT: Measured(limit, None, (1.0,)),
    }
    return Row(SETTINGS[name], 4, sides, 3, 1e-4, CONDITIONS)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "num_gpus", lambda: 8)


@pytest.mark.usefixtures("gpus")
def test_patterns_choose_rows_that_fit_the_ranks() -> None:
    assert [s.name for s in chosen(["1b-*"], 1, {})] == ["1b-batch1", "1b-batch2", "1b-batch4"]
    assert [s.name for s in chosen(["1b-batch1*"], 4, {})] == ["1b-batch1", "1b-batch1-hsdp"]
    assert [s.name for s in chosen(["8b-batch2-recompute"], 2, {})] == ["8b-batch2-recompute"]
    assert len(chosen([], 4, {})) == len(SETTINGS) == 10
    with pytest.raises(ValueError, match="no row is named 2b; the rows are: 1b-batch1, 1b-batch2"):
        chosen(["1b-*", "2b"], 4, {})
    for num_ranks in (1, 2, 3):
        with pytest.raises(
            ValueError, match=f"cannot be divided over {num_ranks} ranks: HSDP takes an even number"
        ):
            chosen(["*-hsdp"], num_ranks, {})


@pytest.mark.usefixtures("gpus")
def test_other_sizes_show_in_the_name() -> None:
    (setting,) = chosen(["1b-batch1"], 2, {"layers": 2, "length": 128})
    assert setting.name == "1b-layers2-length128-batch1"
    assert (setting.sizes.layers, setting.sizes.length, setting.sizes.dim) == (2, 128, 2048)


def test_without_gpus_the_model_is_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "num_gpus", lambda: 0)
    (setting,) = chosen(["8b-batch1-recompute"], 2, {})
    assert (setting.name, setting.sizes.dim) == ("tiny-for-8b-batch1-recompute", 64)
    assert setting.recompute


def test_losses_that_differ_by_more_than_rounding_make_no_row() -> None:
    assert compare([(2.0, 4.0), (1.0, 1.0)], [(2.0, 4.004), (1.0, 1.0)]) == pytest.approx(1e-3, rel=1e-2)
    for wrong in (4.1, float("nan")):
        with pytest.raises(RuntimeError, match="the two sides do not compute the same"):
            compare([(2.0, 4.0), (1.0, 1.0)], [(2.0, wrong), (1.0, 1.0)])


def test_the_slowest_rank_and_the_largest_peak_count() -> None:
    found = slowest([Measured(1.0, 7, (0.5,)), Measured(2.0, 5, (0.6,))])
    assert found == Measured(2.0, 7, (0.5,))
    assert slowest([Measured(1.0, None, ())]).peak_bytes is None


def test_the_sides_take_turns_and_medians_count(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Side] = []
    times = {Side.OURS: [3.0, 100.0, 2.0], Side.PEER: [4.0, 6.0, 0.1], Side.LIMIT: [2.4, 2.4, 2.4]}

    def on_ranks(num_ranks: int, function: Any, side: Side, setting: Setting, steps: Steps) -> list[Measured]:
        calls.append(side)
        return [Measured(times[side].pop(0), GIB, (1.0,))] * num_ranks

    monkeypatch.setattr(fsdp, "on_ranks", on_ranks)
    found = fsdp.run(SETTINGS["1b-batch1"], 4, Steps(), 3, CONDITIONS)
    assert calls == [Side.OURS, Side.PEER, Side.LIMIT] * 3
    assert found.of_peer == pytest.approx(4 / 3)
    assert found.of_limit == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("found", "reached"),
    [
        (row(10, 10, 9.3), True),
        (row(10, 9.9, 9.3), False),  # slower than the peer
        (row(10, 10, 9.1), False),  # too far from the limit
        (row(10, 10, 9.3, peaks=(GIB + 1, GIB)), False),  # more memory
        (row(10, 10, 9.3, peaks=(None, None)), True),
        (row(10, 10, 9.3, "1b-batch1"), False),  # at batch 1 equal is not enough
        (row(10, 11, 9.3, "1b-batch1"), True),
        (row(10, 10.9, 9.3, "8b-batch1-recompute-hsdp"), False),
    ],
)
def test_a_row_reaches_its_goals_or_not(found: Row, reached: bool) -> None:
    assert found.reached is reached


def test_a_row_as_a_table_and_as_json() -> None:
    found = row(250.0, 275.0, 240.0)
    line = found.to_table_row()
    assert line.count("|") == HEADER.splitlines()[0].count("|") == HEADER.splitlines()[1].count("|")
    # Two sequences of 4096 tokens in a quarter of a second.
    assert "| 1b-batch2 | 4 | 0.2500 | 0.2750 | 1.100 | 0.2400 | 0.960 | 32,768 | 1.00 | 2.00 |" in line
    values = json.loads(found.to_json())
    assert values["case"] == "fsdp 1b-batch2"
    assert values["sides"]["FSDP2"]["milliseconds"] == 275.0
    assert values["setting"]["sizes"]["length"] == 4096


def test_a_profile_as_a_table_and_as_json() -> None:
    profile = Profile(9.0, dict.fromkeys(Kind, 1.0), exposed=0.5, idle=0.25)
    for found in (profile, None):
        line = ProfileRow(SETTINGS["1b-batch1"], Side.PEER, found, OnTheHost(3.0, 2.0))
        assert line.to_table_row().count("|") == PROFILE_HEADER.splitlines()[0].count("|")
        assert line.to_table_row().endswith("| 3.0 | 2.0 |")
        assert json.loads(line.to_json())["host"] == {"wall": 3.0, "processor": 2.0}
    values = json.loads(ProfileRow(SETTINGS["1b-batch1"], Side.PEER, profile, OnTheHost(3.0, 2.0)).to_json())
    assert values["gpu"]["busy"]["matmul"] == 1.0


def test_the_command_runs_rows_and_keeps_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fsdp, "run", lambda setting, *_: row(10, 12, 9.5, setting.name))
    monkeypatch.setattr(fsdp, "num_gpus", lambda: 8)
    file = tmp_path / "rows.jsonl"
    assert main(["fsdp", "1b-*", "--ranks", "4", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:6] == file.read_text().splitlines()
    assert lines[-6].startswith("| 1b-batch1 | 4 |")
    monkeypatch.setattr(fsdp, "run", lambda setting, *_: row(10, 9, 9.5, setting.name))
    assert main(["fsdp", "1b-batch1", "--ranks", "4"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["2b"], "no row is named 2b"),
        (["1b-batch1-hsdp", "--ranks", "2"], "cannot be divided over 2 ranks"),
        (["--rounds", "0"], "0 is less than 1"),
        (["--layers", "-1"], "-1 is less than 1"),
    ],
)
def test_a_wrong_call_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["fsdp", *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_the_rows_are_listed_without_running(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fsdp", "--list", "--ranks", "4"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(SETTINGS)
