"""The rows of `bench recompute`: which are chosen, what is compared, what a row says, and a whole run of tiny layers."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench.cases import fsdp_training, recompute, recompute_measured, recompute_picture, recompute_sides
from bench.cases.recompute_measured import Course, Found, Measured, Share
from bench.cases.recompute_row import HEADER, Row
from bench.cases.recompute_settings import ON_HOST, SETTINGS, Side, sizes_for
from bench.conditions import Conditions
from bench.models.sizes import SIZES

CONDITIONS = Conditions("a GPU of a test", {"torch": "2.11.0"}, "0123456789ab")
MIB = 2**20
ONCE = Course(rounds=1, warm=1, timed=1)


def row(name: str, ours: float, peer: float, peak: int | None = 2 * MIB) -> Row:
    setting = SETTINGS[name]
    sides = {
        setting.peer: Measured(peer, MIB),
        setting.ours: Measured(ours, peak),
        Side.PLAIN: Measured(10.0, 3 * MIB),
    }
    found = Found(sides, dict.fromkeys(sides, 1e-3), Share(400, 5.0, 4e4), 4)
    return Row(setting, sizes_for(1), found, 2, CONDITIONS)


@pytest.mark.parametrize(
    ("found", "goals"),
    [
        (row("full", 13.0, 13.0), [True, True]),
        (row("full", 13.2, 13.0), [False, True]),
        (row("selective", 11.0, 12.0, 4 * MIB), [True, False]),
        (row("swap", 11.0, 13.0), [True, True]),
        (row("swap", 11.1, 13.0), [False, True]),
        (row("swap-fitting", 10.5, 0.0), [True, True]),
        (row("swap-fitting", 10.6, 0.0), [False, True]),
        (row("mixed", 13.0, 14.0, None), [True, None]),
    ],
)
def test_a_row_says_of_every_goal_whether_it_is_reached(found: Row, goals: list[bool]) -> None:
    assert list(found.goals.values()) == goals
    assert found.reached is (False not in goals)


def test_the_share_is_the_part_whose_copies_take_no_longer_than_the_forward() -> None:
    assert Share(400, 5.0, 4e4).value == 0.5
    assert Share(100, 5.0, 4e4).value == 1.0


@pytest.mark.parametrize(("name", "peer"), [("swap", "13.00"), ("swap-fitting", "-")])
def test_a_row_as_a_table_and_as_json(name: str, peer: str) -> None:
    found = row(name, 11.0, 13.0)
    line = found.to_table_row()
    assert line.count("|") == HEADER.splitlines()[0].count("|") == HEADER.splitlines()[1].count("|")
    assert line.startswith(f"| {name} | 10.00 | 11.00 | {peer} | 3 | 2 | ")
    assert "| 0.50 (4 of 8 layers) |" in line
    values = json.loads(found.to_json())
    assert (values["case"], values["share"]["value"]) == (f"recompute {name}", 0.5)
    assert values["sides"]["plain"] == {"milliseconds": 10.0, "peak_bytes": 3 * MIB}


def test_layers_are_large_on_a_gpu_and_tiny_without() -> None:
    assert (sizes_for(1).dim, sizes_for(1).layers, sizes_for(1).length) == (4096, 8, 8192)
    assert (sizes_for(0).dim, sizes_for(0, layers=2, length=16).length) == (SIZES["tiny"].dim, 16)


def test_a_side_that_computes_something_else_makes_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_rows_of_swap_are_left_out_with_a_message_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Found({Side.PLAIN: Measured(1.0, None)}, {Side.PLAIN: 0.0}, Share(1, 1.0, 1.0), 0)
    monkeypatch.setattr(recompute, "on_ranks", lambda *args: [found])
    assert recompute.run([SETTINGS["swap"]], ON_HOST, ONCE, CONDITIONS) == []
    monkeypatch.setattr(recompute_sides, "has_swap", lambda: False)
    monkeypatch.setattr(fsdp_training, "device", lambda: "cpu")
    monkeypatch.setattr(recompute_measured, "_compared", lambda *args: {})
    monkeypatch.setattr(recompute_measured, "_share", lambda *args: found.share)
    monkeypatch.setattr(recompute_measured, "_measured", lambda *args: found.sides[Side.PLAIN])
    assert list(recompute_measured.measure([SETTINGS["swap"]], ON_HOST, ONCE).sides) == [
        Side.PLAIN,
        Side.TORCH_SWAP,
    ]
    assert "swap: not measured, this version has no swap" in capsys.readouterr().err


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


def test_a_wrong_call_is_refused_and_rows_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["recompute", "offload"])
    assert exit_info.value.code == 2
    assert "no row is named offload; the rows are: full, selective, swap" in capsys.readouterr().err
    assert main(["recompute", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(SETTINGS)


def test_the_picture_shows_every_side_once_where_it_lies(tmp_path: Path) -> None:
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "curve.svg"
    rows.write_text("\n".join(row(name, 11.0, 13.0).to_json() for name in ("full", "swap")))
    assert recompute_picture.main([str(rows), str(picture)]) == 0
    drawn = picture.read_text()
    assert drawn.count("<circle") == len(
        {"plain", "checkpoint", "torch checkpoint", "swap", "torch save_on_cpu"}
    )
    for side in ("plain", "torch save_on_cpu"):
        assert drawn.count(f">{side}<") == 1
    assert recompute_picture.main([]) == 2
    with pytest.raises(ValueError, match="the row of plain has no memory: measure on a GPU"):
        recompute_picture.points(
            [json.dumps({"sides": {"plain": {"milliseconds": 1.0, "peak_bytes": None}}})]
        )
