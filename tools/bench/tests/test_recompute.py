"""The rows of `bench recompute`: which are chosen, what is compared, and what a row says."""

import json
import re
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.cases import recompute_picture
from bench.cases.recompute_measured import Budget, Found, Measured, Share
from bench.cases.recompute_row import HEADER, Row
from bench.cases.recompute_settings import SETTINGS, Side, sizes_for
from bench.conditions import Conditions
from bench.models.sizes import SIZES

CONDITIONS = Conditions("a GPU of a test", {"torch": "2.11.0"}, "0123456789ab")
MIB = 2**20


def row(name: str, ours: float, peer: float, peak: int | None = 2 * MIB, landed: float = 0.0) -> Row:
    setting = SETTINGS[name]
    sides = {
        setting.peer: Measured(peer, MIB),
        setting.ours: Measured(ours, peak),
        Side.PLAIN: Measured(10.0, 3 * MIB),
    }
    budgets = {setting.ours: Budget(MIB, int(landed * MIB), 2 * MIB, 1.5, ("swap", "keep"))} if landed else {}
    found = Found(sides, dict.fromkeys(sides, 1e-3), Share(400, 5.0, 4e4), 4, budgets)
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
        (row("budget-50", 13.0, 0.0, None), [None, None]),
        (row("budget-50", 13.0, 0.0, landed=0.951), [True, True]),
        (row("budget-30", 13.0, 0.0, landed=0.949), [False, True]),
        (row("budget-75", 13.0, 0.0, 4 * MIB, landed=1.001), [False, False]),
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


def test_a_row_of_a_budget_says_what_was_landed_and_predicted() -> None:
    found = row("budget-50", 13.0, 0.0, landed=0.96875)
    assert "| 1 | 1 | 0.969 | 1.50 |" in found.to_table_row()
    assert found.to_table_row().count("|") == HEADER.splitlines()[0].count("|")
    budget = json.loads(found.to_json())["budget"]
    assert (budget["ratio"], budget["choices"]) == (0.96875, ["swap", "keep"])
    assert json.loads(row("swap", 11.0, 13.0).to_json())["budget"] is None


def test_layers_are_large_on_a_gpu_and_tiny_without() -> None:
    assert (sizes_for(1).dim, sizes_for(1).layers, sizes_for(1).length) == (4096, 8, 8192)
    assert (sizes_for(0).dim, sizes_for(0, layers=2, length=16).length) == (SIZES["tiny"].dim, 16)


def test_a_wrong_call_is_refused_and_rows_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["recompute", "offload"])
    assert exit_info.value.code == 2
    assert "no row is named offload; the rows are: full, selective, swap" in capsys.readouterr().err
    assert main(["recompute", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(SETTINGS)


def test_the_picture_shows_every_side_once_where_it_lies(tmp_path: Path) -> None:
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "curve.svg"
    found = [
        row("full", 11.0, 13.0),
        row("swap", 11.0, 13.0),
        row("budget-50", 12.0, 0.0),
        row("budget-30", 14.0, 0.0),
    ]
    rows.write_text("\n".join([*(each.to_json() for each in found), "", "| a table |"]))
    assert recompute_picture.main([str(rows), str(picture)]) == 0
    drawn = picture.read_text()
    sides = {side for each in found for side in each.setting.sides}
    assert drawn.count('r="5"') == len(sides) == 7
    for side in sides:
        assert f">{side.value.removeprefix('torch ')}</text>" in drawn
    # Points of budgets, and that of all layers kept, are one line.
    (curve,) = [line for line in drawn.splitlines() if 'fill="none"' in line]
    assert curve.count("L") == 2
    assert "a GPU of a test; torch 2.11.0; commit 0123456789ab" in drawn
    assert recompute_picture.main([]) == 2


def test_rows_without_memory_make_no_picture() -> None:
    with pytest.raises(ValueError, match="the row of plain has no memory: measure on a GPU"):
        recompute_picture.read([json.dumps({"sides": {"plain": {"milliseconds": 1.0, "peak_bytes": None}}})])
    with pytest.raises(ValueError, match="there are no rows"):
        recompute_picture.read([])


def test_labels_do_not_lie_upon_each_other() -> None:
    points = {side.value: (200.0 + place % 2, 17.0 + 0.01 * place) for place, side in enumerate(Side)}
    drawn = recompute_picture.drawing(recompute_picture.Rows(points, "a title", "conditions"))
    found = [
        re.search(r'<text x="([-0-9.]+)" y="([-0-9.]+)" text-anchor="(\w+)" fill="#\w+">(.*)</text>', line)
        for line in drawn.splitlines()
    ]
    labels = {side.value.removeprefix("torch ") for side in Side}
    spans = []
    for each in found:
        if each is not None and each[4] in labels:
            width = 6.0 * len(each[4])
            left = float(each[1]) - {"start": 0.0, "middle": width / 2, "end": width}[each[3]]
            spans.append((left, left + width, float(each[2])))
    assert len(spans) == len(Side)
    for place, (left, right, y) in enumerate(spans):
        for other_left, other_right, other_y in spans[:place]:
            assert abs(y - other_y) >= 10 or right <= other_left or left >= other_right
