"""What sharding costs the host, per unit and step: ours beside FSDP2, on blocks so small that nothing else takes time.

A unit is a decoder's block of nine parameters, computed in bfloat16 and reduced in float32. What the same model takes
without sharding is subtracted. On a GPU the host is what a step waits for, and the clock is the wall's. Without one, ranks
wait for each other and for whoever else uses the cores: there, what the processes used of the processor counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bench.case import Better, Case, Sample
from bench.cases.fsdp_settings import Setting
from bench.cases.fsdp_training import Side, backward_of, device, wait
from bench.models.sizes import Sizes
from bench.ranks import measured_on_ranks

NUM_UNITS = 16
NUM_WARM, NUM_STEPS = 3, 5
# The fastest of many, plain and sharded in turn: on a busy machine all others are longer by what was not ours.
NUM_REPEATS = 9


def measure_host(name: str, num_units: int = NUM_UNITS, num_repeats: int = NUM_REPEATS) -> Sample:
    """On a rank: microseconds of forward and backward that sharding adds, per unit."""
    import torch

    setting = Setting("host", Sizes(16, num_units, 2, 1, 32, 32, 8), batch=1)
    steps = [backward_of(side, setting) for side in (Side.LIMIT, Side(name))]
    for step in steps:
        for _ in range(NUM_WARM):
            step()
    best = [float("inf")] * 2
    for _ in range(num_repeats):
        for i, step in enumerate(steps):
            wait()
            torch.distributed.barrier()
            best[i] = min(best[i], _seconds(step))
    return Sample((best[1] - best[0]) / num_units * 1e6)


def _seconds(step: Callable[[], Any]) -> float:
    clock = time.perf_counter if device() == "cuda" else time.process_time
    start = clock()
    for _ in range(NUM_STEPS):
        step()
    wait()
    return (clock() - start) / NUM_STEPS


CASES = tuple(
    Case(
        name=f"fsdp-host-{num_ranks}",
        summary=f"what sharding adds to forward and backward of {NUM_UNITS} tiny blocks, per block, on {num_ranks} rank(s)",
        ours=measured_on_ranks(num_ranks, measure_host, Side.OURS.value),
        peer=measured_on_ranks(num_ranks, measure_host, Side.PEER.value),
        peer_name="FSDP2",
        unit="us added/unit",
        better=Better.LOWER,
        goal=1.0,
    )
    for num_ranks in (1, 2)
)
