"""Runs a case: ours and the peer in turn, so that a machine that slows down or warms up does so for both."""

import gc
import statistics
from collections.abc import Sequence

from bench.case import Case, Sample, Side
from bench.conditions import Conditions
from bench.row import Row

ROUNDS = 3


def run(case: Case, conditions: Conditions, rounds: int = ROUNDS) -> Row:
    """Measure both sides `rounds` times, one after the other, and take the medians."""
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; at least one is needed for a median")
    ours: list[Sample] = []
    peer: list[Sample] = []
    for _ in range(rounds):
        ours.append(build_measure_free(case.ours))
        peer.append(build_measure_free(case.peer))
    return Row.of(case, _median(ours), _median(peer), rounds, conditions)


def build_measure_free(side: Side) -> Sample:
    """One measurement of one side, from nothing to nothing."""
    # What the other side left to the garbage collector must not be collected, or counted, during this one.
    gc.collect()
    with side() as measure:
        return measure()


def _median(samples: Sequence[Sample]) -> Sample:
    peaks = [sample.peak_bytes for sample in samples if sample.peak_bytes is not None]
    known = len(peaks) == len(samples)
    return Sample(
        statistics.median(sample.value for sample in samples),
        round(statistics.median(peaks)) if known else None,
    )
