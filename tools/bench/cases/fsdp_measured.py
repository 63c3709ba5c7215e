"""On a rank: what is measured of the training of one side of `fsdp`."""

from __future__ import annotations

import cProfile
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.cases.fsdp_segments import Segments, marks_on
from bench.cases.fsdp_settings import Setting
from bench.cases.fsdp_training import Side, Step, device, training, wait
from bench.profiles import Profile
from bench.steps import profile_of, times_on_device, times_on_host

# A step of it takes the GPU less than the host: as many layers as the model has, and next to nothing in them.
ON_THE_HOST = {"dim": 64, "heads": 4, "groups": 2, "hidden": 128, "vocabulary": 256, "length": 16}


@dataclass(frozen=True)
class Steps:
    """How many steps are taken."""

    warm: int = 5
    """Before time counts: memory is taken, orders are recorded, kernels are chosen. Their losses are compared."""
    timed: int = 12


@dataclass(frozen=True)
class Measured:
    """Of one side, in one round."""

    milliseconds: float
    """Of a step, the median."""
    peak_bytes: int | None
    """Of the GPU's memory in the timed steps."""
    losses: tuple[float, ...]
    """Of the first steps on this rank."""


@dataclass(frozen=True)
class OnTheHost:
    """Milliseconds of a step whose kernels are so small that only the host counts."""

    wall: float
    """The median."""
    processor: float
    """Used by all threads of the process, the mean."""


def measure(side: Side, setting: Setting, steps: Steps) -> Measured:
    """The time of a step, as the median of those that follow the warm ones."""
    import torch

    on_gpu = device() == "cuda"
    step = training(side, setting)
    losses = [step() for _ in range(steps.warm)]
    wait()
    torch.distributed.barrier()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = times_on_device(step, steps.timed)
    peak = _peak_bytes(side) if on_gpu else None
    return Measured(statistics.median(times), peak, tuple(loss.item() for loss in losses))


def profile(side: Side, setting: Setting, steps: Steps, trace: Path | None) -> Profile:
    """Where the time of a step on the GPU goes; the trace of rank 0 is kept in a file if one is named (`.json.gz`).

    The profiler costs the host time: a step that the host bounds is longer, and idler, than without it.
    """
    step = training(side, setting)
    for _ in range(steps.warm):
        step()
    return profile_of(step, trace)


def measure_segments(side: Side, setting: Setting, steps: Steps) -> Segments:
    """How long the parts of a step take."""
    marks = marks_on(device())
    step = training(side, setting, marks)
    for _ in range(steps.warm):
        step()
    marks.steps.clear()
    for _ in range(steps.timed):
        step()
    wait()
    return marks.segments()


def measure_host(side: Side, setting: Setting, steps: Steps) -> OnTheHost:
    """What a step costs the host, from a model of as many layers, and of nearly nothing else."""
    step = _warm_on_the_host(side, setting, steps)
    before = time.process_time()
    times = times_on_host(step, steps.timed)
    used = time.process_time() - before
    wait()
    return OnTheHost(statistics.median(times), used * 1e3 / steps.timed)


def functions(side: Side, setting: Setting, steps: Steps, count: int) -> list[str]:
    """Lines of a table: the functions in which the host of :func:`measure_host` spends most, by their own time.

    The profiler of Python makes calls dearer: they are to be compared with each other, not with a clock.
    """
    import torch

    step = _warm_on_the_host(side, setting, steps)
    profiler = cProfile.Profile(time.thread_time)  # waiting is no work
    # The profiler follows one thread: backward is to run in this one, on a GPU too.
    with torch.autograd.set_multithreading_enabled(False):
        profiler.enable()
        for _ in range(steps.timed):
            step()
        profiler.disable()
    wait()
    lines = []
    found = sorted(profiler.getstats(), key=lambda entry: -entry.inlinetime)
    for entry in found[:count]:
        own, whole = (x * 1e6 / steps.timed for x in (entry.inlinetime, entry.totaltime))
        calls = entry.callcount / steps.timed
        lines.append(f"| {side.value} | {own:.0f} | {whole:.0f} | {calls:.1f} | {_name_of(entry.code)} |")
    return lines


def _name_of(code: Any) -> str:
    """Of a function of Python with its place, or of a built-in one."""
    if isinstance(code, str):
        return code
    return f"{code.co_name} ({'/'.join(Path(code.co_filename).parts[-3:])}:{code.co_firstlineno})"


def _warm_on_the_host(side: Side, setting: Setting, steps: Steps) -> Step:
    small = replace(setting, sizes=replace(setting.sizes, **ON_THE_HOST))
    step = training(side, small)
    for _ in range(steps.warm):
        step()
    wait()
    return step


def _peak_bytes(side: Side) -> int:
    """Since the last reset, on this GPU: what the allocator has given, and of ours also memory that it does not know of."""
    import torch

    if side is not Side.OURS:
        return torch.cuda.max_memory_allocated()
    from hp_platform import get_platform

    return get_platform().device("cuda").max_memory_allocated()
