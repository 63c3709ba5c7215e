"""Measuring benchmarks on several ranks: rank 0's sample counts, and the processes stay for the other side."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.case import Sample
from bench.cases import checkpoint
from bench.cases.dtensor import overhead
from bench.cases.dtensor_asynchronous import measure_overlap, overlapping_step, write_trace
from bench.cases.dtensor_layer import check_same_results, measure_layer
from bench.cases.dtensor_redistribution import PAIRS, measure_redistribution
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


@pytest.mark.parametrize("name", ["ours", "torch"])
def test_every_pair_of_placements_is_redistributed_in_both_libraries(name: str) -> None:
    with measured_on_ranks(2, every_pair, name)() as measure:
        assert measure().value > 0


def every_pair(name: str) -> Sample:
    """The slowest pair on a small square. Values are compared in the measurement."""
    return max((measure_redistribution(name, pair, 16) for pair in PAIRS), key=lambda sample: sample.value)


@pytest.mark.parametrize("name", ["ours", "torch"])
@pytest.mark.parametrize(
    "function", [checkpoint.measure_save, checkpoint.measure_async_save, checkpoint.measure_load]
)
def test_a_small_state_is_saved_and_loaded_in_both_libraries(
    function: Callable[[str, int], Sample], name: str
) -> None:
    # What is loaded is compared with what was saved in the measurement.
    with measured_on_ranks(2, function, name, 1)() as measure:
        assert measure().value > 0


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_an_all_gather_beside_products_is_measured_either_way(is_asynchronous: bool) -> None:
    with measured_on_ranks(2, measure_overlap, is_asynchronous)() as measure:
        assert measure().value > 0


def test_the_trace_shows_the_products_between_start_and_wait(tmp_path: Path) -> None:
    with measured_on_ranks(2, traced_step, str(tmp_path))() as measure:
        measure()
    (file,) = tmp_path.iterdir()
    names = [event["name"] for event in json.loads(file.read_text())["traceEvents"] if "name" in event]
    assert "aten::mm" in names
    assert any("all" in name and "gather" in name for name in names)


def traced_step(folder: str) -> Sample:
    """A trace of one asynchronous step, which gives the whole tensor."""
    import torch

    step = overlapping_step("cpu", is_asynchronous=True)
    with torch.no_grad():
        write_trace(step, Path(folder), "cpu")
        gathered, _ = step()
    assert gathered.to_local().shape == gathered.shape
    return Sample(0.0)
