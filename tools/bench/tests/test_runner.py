"""The order of the measurements, their medians, and what a row says."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from bench import runner
from bench.case import Better, Case, Measure, Sample, Side
from bench.conditions import Conditions
from bench.row import HEADER

CONDITIONS = Conditions("2 cores of a test", {"python": "3.11", "torch": "2.13.0"}, "0123456789ab")


class Recorder:
    """A side that notes when it is built, measured and freed, and measures the given samples."""

    def __init__(self, name: str, events: list[str], samples: list[Sample]) -> None:
        self.name, self.events, self.samples = name, events, list(samples)

    def __call__(self) -> AbstractContextManager[Measure]:
        return self._run()

    @contextmanager
    def _run(self) -> Iterator[Measure]:
        self.events.append(f"build {self.name}")
        try:
            yield self._measure
        finally:
            self.events.append(f"free {self.name}")

    def _measure(self) -> Sample:
        self.events.append(f"measure {self.name}")
        return self.samples.pop(0)


def case(ours: Side, peer: Side, better: Better = Better.LOWER, goal: float = 1.0) -> Case:
    return Case("a-case", "does it", ours, peer, "the peer", "ms", better, goal)


def samples(*values: float, peak: int | None = 2**20) -> list[Sample]:
    return [Sample(value, peak) for value in values]


def test_the_sides_take_turns_and_never_stand_side_by_side() -> None:
    events: list[str] = []
    ours, peer = Recorder("ours", events, samples(1, 1)), Recorder("peer", events, samples(1, 1))
    runner.run(case(ours, peer), CONDITIONS, rounds=2)
    turn = [f"{step} {side}" for side in ("ours", "peer") for step in ("build", "measure", "free")]
    assert events == turn * 2


def test_a_side_is_freed_when_its_measurement_fails() -> None:
    events: list[str] = []
    with pytest.raises(IndexError):
        runner.build_measure_free(Recorder("ours", events, []))
    assert events == ["build ours", "measure ours", "free ours"]


def test_medians_ignore_the_outlier() -> None:
    row = runner.run(
        case(Recorder("ours", [], samples(3, 100, 2)), Recorder("peer", [], samples(4, 6, 0.1))), CONDITIONS
    )
    assert (row.ours, row.peer, row.ratio, row.rounds) == (3, 4, 0.75, 3)


def test_a_memory_that_is_not_always_known_is_not_quoted() -> None:
    known = Recorder("ours", [], [Sample(1, 10), Sample(1, 30), Sample(1, 20)])
    unknown = Recorder("peer", [], [Sample(1, 10), Sample(1, None), Sample(1, 20)])
    row = runner.run(case(known, unknown), CONDITIONS)
    assert (row.ours_peak_bytes, row.peer_peak_bytes) == (20, None)
    assert "| not known |" in row.to_table_row()


@pytest.mark.parametrize(
    ("better", "goal", "ours", "reached"),
    [
        (Better.LOWER, 1.05, 1.05, True),
        (Better.LOWER, 1.05, 1.06, False),
        (Better.HIGHER, 0.92, 0.92, True),
        (Better.HIGHER, 0.92, 0.91, False),
    ],
)
def test_the_goal_is_a_bound_on_the_ratio(better: Better, goal: float, ours: float, reached: bool) -> None:
    sides = Recorder("ours", [], samples(ours)), Recorder("peer", [], samples(1.0))
    assert runner.run(case(*sides, better, goal), CONDITIONS, rounds=1).reached is reached


def test_the_json_line_holds_all_that_a_quoted_number_needs() -> None:
    row = runner.run(case(Recorder("o", [], samples(1)), Recorder("p", [], samples(2))), CONDITIONS, rounds=1)
    line = row.to_json()
    assert "\n" not in line
    assert json.loads(line) == {
        "case": "a-case",
        "ours": 1,
        "peer": 2,
        "peer_name": "the peer",
        "unit": "ms",
        "ratio": 0.5,
        "goal": "<= 1",
        "reached": True,
        "ours_peak_bytes": 2**20,
        "peer_peak_bytes": 2**20,
        "rounds": 1,
        "conditions": {
            "hardware": "2 cores of a test",
            "versions": {"python": "3.11", "torch": "2.13.0"},
            "commit": "0123456789ab",
        },
    }


def test_the_table_row_fits_its_header() -> None:
    row = runner.run(case(Recorder("o", [], samples(1)), Recorder("p", [], samples(2))), CONDITIONS, rounds=1)
    assert row.to_table_row().count("|") == HEADER.splitlines()[0].count("|")
    assert "| 1 | 2 (the peer) | ms | 0.500 | <= 1 | yes | 1.0 MiB | 1.0 MiB |" in row.to_table_row()


def test_a_peer_that_measures_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="the peer measured 0 ms"):
        runner.run(case(Recorder("o", [], samples(1)), Recorder("p", [], samples(0))), CONDITIONS, rounds=1)


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="rounds is 0"):
        runner.run(case(Recorder("o", [], []), Recorder("p", [], [])), CONDITIONS, rounds=0)
