"""An all-gather beside products that do not need it: started before them and waited for behind, and one after the other.

Both sides are ours: the peer is the same work with the plain ``redistribute``. On cuda the measurement leaves a trace of one
asynchronous step of rank 0 in the folder that the environment variable ``BENCH_TRACES`` names, if it names one.
"""

import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.case import Better, Case, Sample
from bench.cases.dtensor import NUM_RANKS, Kind
from bench.ranks import device_type, measured_on_ranks, times_of_calls

TRACES = "BENCH_TRACES"
NUM_STEPS, NUM_REPEATS = 10, 7
# Side of the gathered square of float32 (64 MiB on cuda, 4 MiB else), side of the square products and their number.
ON_GPU, ON_CPU = (4096, 4096, 3), (1024, 384, 4)


def measure_overlap(is_asynchronous: bool) -> Sample:
    """On a rank: one all-gather and the products beside it, in milliseconds; the median of the repetitions."""
    torch = Kind("ours").torch
    device = device_type(NUM_RANKS)
    step = overlapping_step(device, is_asynchronous)
    with torch.no_grad():
        times = times_of_calls(step, NUM_STEPS, NUM_REPEATS + 2, device)
        folder = os.environ.get(TRACES)
        if folder and is_asynchronous:
            write_trace(step, Path(folder), device)
    return Sample(statistics.median(times[2:]) * 1e3)


def overlapping_step(device: str, is_asynchronous: bool) -> Callable[[], Any]:
    """What is measured; gives the gathered tensor and the last product."""
    kind = Kind("ours")
    torch = kind.torch
    side, factor_side, num_products = ON_GPU if device == "cuda" else ON_CPU
    mesh = kind.mesh(device, torch.distributed.get_world_size())
    x = kind.distribute(torch.rand((side, side), device=device), mesh, [kind.shard(0)])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a = torch.rand((factor_side, factor_side), device=device, dtype=dtype) / factor_side

    def step() -> Any:
        gathered = x.redistribute(placements=[kind.replicate], async_op=is_asynchronous)
        b = a
        for _ in range(num_products):
            b = a @ b
        return (gathered.wait() if is_asynchronous else gathered), b

    return step


def write_trace(step: Callable[[], Any], folder: Path, device: str) -> None:
    """One step of rank 0 as a trace for chrome://tracing or Perfetto; the other ranks take part."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=kinds) as profiler:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / "dtensor-redistribute-async.json"))


CASES = (
    Case(
        name="dtensor-redistribute-async",
        summary="an all-gather of 64 MiB (4 MiB without GPUs) started before products and waited for behind them, 2 ranks",
        ours=measured_on_ranks(NUM_RANKS, measure_overlap, True),
        peer=measured_on_ranks(NUM_RANKS, measure_overlap, False),
        peer_name="the same one after the other",
        unit="ms/step",
        better=Better.LOWER,
        goal=1.0,
    ),
)
