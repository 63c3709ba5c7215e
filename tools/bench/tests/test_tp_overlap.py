"""The rows of `bench tp-overlap`: which are chosen, what of the communication is hidden, and what a row says."""

import json

import pytest

from bench.cases import tp_overlap
from bench.cases.tp_overlap import HEADER, LAYERS, Row
from bench.cases.tp_overlap_sides import SIDES, Found, beside, hidden
from bench.conditions import Conditions
from bench.profiles import Activity, Profile

CONDITIONS = Conditions("4 GPUs of a test", {"torch": "2.11.0"}, "0123456789ab")


def row(**milliseconds: float) -> Row:
    sides = {side: Found(milliseconds.get(side, 1.0), 0.25, 0.5) for side in SIDES}
    return Row(LAYERS["down-4096"], 4, sides, 3, CONDITIONS)


def test_there_is_a_row_for_every_shape_and_length() -> None:
    shapes, lengths = ("qkv", "gate", "gate-up", "o", "down"), (512, 2048, 4096, 8192)
    assert set(LAYERS) == {f"{s}-{n}{way}" for s in shapes for n in lengths for way in ("", "-forward")}


def test_patterns_choose_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tp_overlap, "num_gpus", lambda: 8)
    assert [layer.name for layer in tp_overlap.chosen(["o-*[0-9]"], 4)] == [
        f"o-{n}" for n in (512, 2048, 4096, 8192)
    ]
    with pytest.raises(ValueError, match="no row is named k-512; the rows are: qkv-512, "):
        tp_overlap.chosen(["o-*", "k-512"], 4)
    with pytest.raises(ValueError, match="cannot be dealt to 3 ranks: give a divisor of its sizes"):
        tp_overlap.chosen(["o-512"], 3)


def test_communication_is_hidden_where_it_does_not_make_the_step_longer() -> None:
    times = {"product": 1.0, "plain": 1.5, "ours": 1.1, "chunks": 1.6}
    found = {side: hidden(times, side) for side in times}
    assert found == {"product": None, "plain": 0.0, "ours": pytest.approx(0.8), "chunks": pytest.approx(-0.2)}
    assert hidden({"product": 1.0, "plain": 1.0, "ours": 1.0}, "ours") is None


def test_the_slowest_rank_counts() -> None:
    ranks = [
        {"product": Found(1.0), "plain": Found(plain), "ours": Found(ours, 0.0, 0.5)}
        for plain, ours in ((2, 1.5), (3, 1.2))
    ]
    assert tp_overlap._slowest(ranks)["ours"] == Found(1.5, pytest.approx(0.75), 0.5)


def test_communication_runs_beside_what_is_computed() -> None:
    profile = Profile.of(
        [
            Activity("ncclDevKernel_AllGather", 0.0, 10.0),
            Activity("nvjet_gemm", 4.0, 12.0),
            Activity("ncclDevKernel_ReduceScatter", 12.0, 22.0),
        ],
        num_steps=1,
    )
    assert beside(profile) == pytest.approx(6.0 / 20.0)
    assert beside(Profile.of([Activity("nvjet_gemm", 0.0, 1.0)], num_steps=1)) is None


def test_a_row_compares_ours_with_the_plain_program() -> None:
    faster = row(ours=0.8)
    assert (faster.ratio, faster.reached, row(ours=1.03).reached) == (0.8, True, False)
    cells = faster.to_table_row().split(" | ")
    assert len(cells) == len(HEADER.splitlines()[0].split(" | "))
    assert {"25%", "50%"} <= set(cells)
    assert json.loads(faster.to_json())["sides"]["ours"] == {
        "milliseconds": 0.8,
        "hidden": 0.25,
        "beside": 0.5,
    }
