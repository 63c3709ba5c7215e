"""On a rank: what is measured of the sides of `optim`."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.cases.fsdp_training import device, wait
from bench.cases.optim_settings import Setting, Side
from bench.cases.optim_sides import Optimized, empty_cache, limit_steps, shapes_of
from bench.profiles import Profile
from bench.steps import profile_of, times_on_device

# How far the change of a matrix in a step may lie from torch's, relative to its norm: both iterate in bfloat16, and round in other
# places: in five steps a singular value is off by some percent. What is scaled or cut otherwise is off by more.
TOLERANCE = 0.1


@dataclass(frozen=True)
class Course:
    """How often what is run."""

    rounds: int = 3
    warm: int = 2
    timed: int = 5


@dataclass(frozen=True)
class Measured:
    """Of one side, on one rank or the slowest."""

    milliseconds: float
    """Of a step, the median over the steps of a round, and over the rounds."""
    peak_bytes: int | None = None
    """Of the GPU's memory in a step, parameters, gradients and state included; the largest of the rounds."""
    sent_bytes: int = 0
    """That this rank sends in a step, by the inputs of its collectives."""
    launches: Mapping[str, int] = field(default_factory=dict)
    """Collectives that this rank starts in a step."""


def measure(side: Side, setting: Setting, course: Course) -> Measured:
    """One round of one side, built and freed."""
    if side in (Side.LIMIT, Side.ITERATIONS):
        return Measured(_limit(setting, course, side))
    import torch

    optimized = Optimized(side, setting)
    sent, launches = _traffic(optimized) if side is Side.OURS else (0, {})
    on_gpu = device() == "cuda"
    for _ in range(course.warm):
        optimized.step()
    wait()
    torch.distributed.barrier()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = times_on_device(optimized.step, course.timed)
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    del optimized
    empty_cache()
    return Measured(statistics.median(times), peak, sent, launches)


def profile(setting: Setting, course: Course, trace: Path | None) -> Profile:
    """Where the time of our step on the GPU goes; the trace of rank 0 is kept in a file if one is named (`.json.gz`)."""
    optimized = Optimized(Side.OURS, setting)
    for _ in range(course.warm):
        optimized.step()
    return profile_of(optimized.step, trace)


def _traffic(optimized: Optimized) -> tuple[int, dict[str, int]]:
    from hp_platform.recording import record_collectives

    optimized.step()  # of the first one plans are made, which ranks compare
    with record_collectives() as record:
        optimized.step()
    return record.nbytes(), dict(Counter(launch.kind for launch in record.launches))


def _limit(setting: Setting, course: Course, side: Side) -> float:
    """Newton-Schulz of all matrices, each at the rate of the fastest batch of its shape, divided by the ranks."""
    import torch

    total = 0.0
    for shape, count in Counter(shape for _, shape in shapes_of(setting)).items():
        best = float("inf")
        for call, factor in limit_steps([shape] * count, side):
            for _ in range(course.warm):
                call()
            wait()
            torch.distributed.barrier()
            best = min(best, statistics.median(times_on_device(call, course.timed)) * factor)
        total += best
        empty_cache()
    return total / torch.distributed.get_world_size()


def compare(setting: Setting) -> float:
    """The largest distance of a matrix's change in two steps from torch's, relative to that; of a model of one layer.

    RuntimeError if the sides do not compute the same.
    """
    small = replace(setting, sizes=replace(setting.sizes, layers=1))
    changes = {side: _changes(side, small) for side in (Side.OURS, Side.PEER)}
    largest = 0.0
    for name, expected in changes[Side.PEER].items():
        apart = float(((changes[Side.OURS][name] - expected).norm() / expected.norm()).item())
        largest = max(largest, apart)
        if not apart <= TOLERANCE:  # not for nan either
            raise RuntimeError(
                f"the sides do not compute the same: the change of {name} differs from {Side.PEER.value}'s by {apart:.2e} of its "
                f"norm, at most {TOLERANCE:g} is rounding; a ratio of their times would mean nothing"
            )
    return largest


def _changes(side: Side, setting: Setting) -> dict[str, Any]:
    optimized = Optimized(side, setting)

    def values() -> dict[str, Any]:
        found = {}
        for name, parameter in optimized.named:
            value = parameter.detach()
            # Cloned: on one rank the full tensor is the parameter's own memory, and would change with it.
            found[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        return found

    before = values()
    for _ in range(2):
        optimized.step()
    return {name: value - before[name] for name, value in values().items()}


def slowest(ranks: Sequence[Measured]) -> Measured:
    """A step ends when the last rank has done it, memory must do for the rank that takes most; what is sent is the mean."""
    peaks = [rank.peak_bytes for rank in ranks if rank.peak_bytes is not None]
    return Measured(
        max(rank.milliseconds for rank in ranks),
        max(peaks, default=None),
        round(statistics.mean(rank.sent_bytes for rank in ranks)),
        ranks[0].launches,
    )


def over_rounds(rounds: Sequence[Measured]) -> Measured:
    """The median time, and the largest peak."""
    peaks = [each.peak_bytes for each in rounds if each.peak_bytes is not None]
    milliseconds = statistics.median(each.milliseconds for each in rounds)
    return replace(rounds[0], milliseconds=milliseconds, peak_bytes=max(peaks, default=None))


def bytes_in_theory(setting: Setting, num_ranks: int, itemsize: int = 2) -> int:
    """That a rank sends at least, on average: every element once to the owner and once back, but for those that lie there.

    In the two bytes of the iteration. Of replicas one has what is sent to the owner, and all get it back.
    """
    shards = num_ranks // setting.replicas
    elements = sum(rows * cols for _, (rows, cols) in shapes_of(setting))
    to_owners = elements * (shards - 1) / shards
    back = elements * setting.replicas - elements / shards
    return round((to_owners + back) * itemsize / num_ranks)
