"""Measuring benchmarks on several ranks: rank 0's sample counts, and the processes stay for the other side."""

import os
import time

import pytest

from bench.case import Sample
from bench.cases.dtensor import overhead
from bench.cases.dtensor_layer import check_same_results, measure_layer
from bench.ranks import measured_on_ranks

pytestmark = pytest.mark.once  # the ranks are processes of torch on cpu


def place(offset: int) -> Sample:
    """The rank plus an offset, and as peak memory the process."""
    import torch.distributed as dist

    return Sample(dist.get_rank() + offset, os.getpid())


def test_both_sides_meet_the_same_processes_and_rank_0_counts() -> None:
    samples = []
    for offset in (5, 7):
        with measured_on_ranks(2, place, offset)() as measure:
            samples.append(measure())
    assert [sample.value for sample in samples] == [5, 7]
    assert samples[0].peak_bytes == samples[1].peak_bytes != os.getpid()


def test_overhead_is_what_the_second_call_takes_longer() -> None:
    found = overhead((lambda: time.sleep(0), lambda: time.sleep(0.001)), num_calls=3)
    assert 900 < found < 20_000


@pytest.mark.parametrize("name", ["ours", "torch"])
def test_the_layer_runs_in_both_libraries_with_equal_losses_and_gradients(name: str) -> None:
    # The measurement itself compares, and raises where they differ.
    with measured_on_ranks(2, measure_layer, name, 512)() as measure:
        assert measure().value > 0


def test_a_peer_that_computes_something_else_is_refused() -> None:
    with (
        pytest.raises(RuntimeError, match="the two sides do not compute the same: the loss differs by"),
        measured_on_ranks(2, with_other_weights)() as measure,
    ):
        measure()


def with_other_weights() -> Sample:
    """The comparison of the layer, where torch's side is made from another seed."""
    import torch

    seed = torch.manual_seed
    seeds = iter((0, 1))
    torch.manual_seed = lambda _: seed(next(seeds))
    try:
        check_same_results(256)
    finally:
        torch.manual_seed = seed
    return Sample(0.0)
