"""The rows of `bench optim`: which are chosen, what is compared, and what a row says."""

import json
from typing import Any

import pytest

from bench.__main__ import main
from bench.cases import optim
from bench.cases.optim import chosen
from bench.cases.optim_measured import Measured, over_rounds, slowest
from bench.cases.optim_row import HEADER, Row
from bench.cases.optim_settings import SETTINGS, Side
from bench.conditions import Conditions

CONDITIONS = Conditions("4 GPUs of a test", {"torch": "2.11.0"}, "0123456789ab")
MIB = 2**20


def row(ours: float, limit: float, sent: int = 100, peaks: tuple[Any, Any] = (MIB, 2 * MIB)) -> Row:
    sides = {
        Side.OURS: Measured(ours, peaks[0], sent, {"all_to_all": 4}),
        Side.LIMIT: Measured(limit),
        Side.ITERATIONS: Measured(limit / 2),
        Side.PEER: Measured(40.0, peaks[1]),
        Side.ADAMW: Measured(2.0, MIB),
    }
    return Row(SETTINGS["1b"], 4, sides, 100, 1e-2, 3, CONDITIONS)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "num_gpus", lambda: 8)


@pytest.mark.usefixtures("gpus")
def test_rows_are_chosen_that_fit_the_ranks() -> None:
    assert [each.name for each in chosen([], 4)] == ["1b", "1b-hsdp"]
    assert [each.name for each in chosen([], 2)] == ["1b"]
    (setting,) = chosen(["1b"], 8, layers=3)
    assert (setting.name, setting.sizes.layers, setting.sizes.dim) == ("1b-layers3", 3, 2048)
    with pytest.raises(ValueError, match="1b-hsdp cannot be divided over 3 ranks: HSDP takes an even number"):
        chosen(["1b-hsdp"], 3)
    with pytest.raises(ValueError, match="no row is named 8b; the rows are: 1b, 1b-hsdp"):
        chosen(["8b"], 4)


def test_without_gpus_the_model_is_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "num_gpus", lambda: 0)
    assert [(each.name, each.sizes.dim) for each in chosen(["1b"], 2)] == [("tiny-for-1b", 64)]


@pytest.mark.parametrize(
    ("found", "goals"),
    [
        (row(11.0, 10.0), [True, True, True]),
        (row(11.1, 10.0), [False, True, True]),
        (row(11.0, 10.0, sent=102), [True, False, True]),
        (row(11.0, 10.0, peaks=(2 * MIB, 2 * MIB)), [True, True, False]),
        (row(11.0, 10.0, peaks=(None, None)), [True, True]),
    ],
)
def test_a_row_says_of_every_goal_whether_it_is_reached(found: Row, goals: list[bool]) -> None:
    assert list(found.goals.values()) == goals
    assert found.reached is all(goals)


def test_a_row_as_a_table_and_as_json() -> None:
    found = row(11.0, 10.0, 3 * MIB)
    line = found.to_table_row()
    assert line.count("|") == HEADER.splitlines()[0].count("|") == HEADER.splitlines()[1].count("|")
    assert line.startswith(
        "| 1b | 4 | 11.00 | 10.00 | 5.00 | 40.00 | 2.00 | 1.100 | 2.200 | 0.275 | 5.500 | 3.0 | 0.0 | 4 all_to_all |"
    )
    values = json.loads(found.to_json())
    assert (values["case"], values["of_limit"], values["of_adamw"]) == ("optim 1b", 1.1, 5.5)
    assert values["sides"]["Muon"]["launches"] == {"all_to_all": 4}


def test_the_slowest_rank_the_mean_of_the_bytes_and_the_median_round_count() -> None:
    found = slowest([Measured(1.0, 7, 10, {"all_to_all": 2}), Measured(2.0, 5, 20, {"all_to_all": 3})])
    assert found == Measured(2.0, 7, 15, {"all_to_all": 2})
    assert slowest([Measured(1.0)]).peak_bytes is None
    assert over_rounds([Measured(1.0, 7, 3), Measured(9.0, 8, 3), Measured(2.0, 6, 3)]) == Measured(2.0, 8, 3)


def test_a_wrong_call_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["optim", "2b"])
    assert exit_info.value.code == 2
    assert "no row is named 2b" in capsys.readouterr().err


def test_the_rows_are_listed_without_running(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optim", "--list", "--ranks", "4"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
