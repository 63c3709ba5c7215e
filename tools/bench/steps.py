"""On a rank: how long steps take, and where the time of a step on a GPU goes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.profiles import Profile, durations_of, read_activities, shortest_of
from bench.ranks import device_type

Step = Callable[[], Any]
PROFILED_STEPS = 3


def times_on_device(step: Step, num_steps: int) -> list[float]:
    """Milliseconds of every step: between the ends of steps on a GPU, else until each returns."""
    import torch

    on_gpu = device_type(torch.distributed.get_world_size()) == "cuda"
    return (_times_on_gpu if on_gpu else times_on_host)(step, num_steps)


def times_on_host(step: Step, num_steps: int) -> list[float]:
    """Until the step returns, in milliseconds."""
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _times_on_gpu(step: Step, num_steps: int) -> list[float]:
    """Between the ends of steps, in milliseconds. Nothing waits in between: the host may run ahead, as in training."""
    import torch

    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in pairwise(marks)]


def profile_of(step: Step, trace: Path | None) -> Profile:
    """Of three steps on a GPU that have been warmed; the trace of rank 0 is kept in a file if one is named (`.json.gz`).

    All ranks call, and tell each other how long their collectives took. The profiler costs the host time: a step that the host
    bounds is longer, and idler, than without it.
    """
    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):  # the first one takes long to begin
        step()
        torch.cuda.synchronize()
    torch.distributed.barrier()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        keep = trace is not None and torch.distributed.get_rank() == 0
        file = trace if trace is not None and keep else Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(file))
        activities = read_activities(file)
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, durations_of(activities))
    return Profile.of(activities, PROFILED_STEPS, shortest_of(ranks))
