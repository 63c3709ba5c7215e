"""On a rank: what is measured of the sides of `tp`. They are built once and kept, and take turns on every length."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cases.fsdp_training import device, wait
from bench.cases.tp_settings import Setting, Side
from bench.cases.tp_sides import Built, Inputs, requested_bytes
from bench.profiles import Profile
from bench.steps import profile_of, times_on_device

# How far results may lie apart, relative to the norm: bfloat16 is rounded in other places. What is missing or twice there is more.
TOLERANCE = {"cuda": 1e-1, "cpu": 1e-5}


@dataclass(frozen=True)
class Course:
    """How often what is run."""

    rounds: int = 3
    warm: int = 3
    timed: int = 20
    profiled: bool = False
    traces: str | None = None
    """The folder."""


@dataclass(frozen=True)
class Measured:
    """Of one side on one length."""

    milliseconds: float
    """Of a step, the median over the steps of a round, and over the rounds."""
    peak_bytes: int | None
    """Of the GPU's memory in a step, with the side's own parameters; the largest of the rounds."""
    profile: Profile | None = None


@dataclass(frozen=True)
class Compared:
    """All sides on one length, and how far their results lie from the peer's, relative to the norm."""

    sides: Mapping[Side, Measured]
    apart: float


def measure(settings: Sequence[Setting], course: Course) -> list[Compared]:
    """Of settings of one family, in their order. RuntimeError if the sides do not compute the same."""
    import torch

    family = settings[0].family
    if family.compiled:
        _allow_many_lengths()
    built = {side: Built(side, family) for side in Side}
    found = []
    for setting in settings:
        inputs = Inputs.of(family, setting.length)
        apart = compare(built, inputs)
        found.append(Compared(_measured(built, inputs, setting, course), apart))
    del built
    if family.compiled:
        torch.compiler.reset()
    if device() == "cuda":
        torch.cuda.empty_cache()
    return found


def _allow_many_lengths() -> None:
    """A block is compiled for every length, and more code than dynamo keeps by itself must not run eagerly instead."""
    import torch._dynamo.config as config

    config.recompile_limit = 64
    config.accumulated_recompile_limit = 1024
    config.fail_on_recompile_limit_hit = True


def compare(built: Mapping[Side, Built], inputs: Inputs) -> float:
    """The largest distance of a result of any side from the peer's."""
    peer = dict(built[Side.PEER].results(inputs))
    largest = 0.0
    for side in (Side.OURS, Side.LIMIT):
        for name, found in built[side].results(inputs):
            apart = distance(found, peer[name])
            largest = max(largest, apart)
            if not apart <= TOLERANCE[device()]:  # not for nan either
                raise RuntimeError(
                    f"the sides do not compute the same: {name} of {side.value} differs from {Side.PEER.value}'s by "
                    f"{apart:.2e} of its norm, at most {TOLERANCE[device()]:.0e} is rounding; a ratio of their times would "
                    f"mean nothing"
                )
    return largest


def distance(found: Any, expected: Any) -> float:
    """Relative to the norm of what is expected. ValueError for another shape."""
    if found.shape != expected.shape:
        raise ValueError(f"a piece of shape {tuple(found.shape)} beside one of {tuple(expected.shape)}")
    norm = expected.float().norm()
    return float(((found.float() - expected.float()).norm() / norm).item())


def _measured(
    built: Mapping[Side, Built], inputs: Inputs, setting: Setting, course: Course
) -> dict[Side, Measured]:
    times: dict[Side, list[float]] = {side: [] for side in Side}
    peaks: dict[Side, list[int]] = {side: [] for side in Side}
    for _ in range(course.rounds):
        for side in Side:
            milliseconds, peak = _one_round(built[side], inputs, course)
            times[side].append(milliseconds)
            if peak is not None:
                peaks[side].append(peak)
    return {
        side: Measured(
            statistics.median(times[side]),
            max(peaks[side], default=None),
            _profile(built[side], inputs, course, f"tp-{setting.name}-{side.value}"),
        )
        for side in Side
    }


def _one_round(built: Built, inputs: Inputs, course: Course) -> tuple[float, int | None]:
    import torch

    for _ in range(course.warm):
        built.step(inputs)
    wait()
    torch.distributed.barrier()
    on_gpu = device() == "cuda"
    before = 0
    if on_gpu:
        before = requested_bytes("current")
        torch.cuda.reset_peak_memory_stats()
    times = times_on_device(lambda: built.step(inputs), course.timed)
    # The other sides' parameters lie beside, and are not this one's.
    peak = requested_bytes("peak") - before + built.nbytes if on_gpu else None
    return statistics.median(times), peak


def _profile(built: Built, inputs: Inputs, course: Course, name: str) -> Profile | None:
    if not course.profiled or device() != "cuda":
        return None
    trace = None
    if course.traces is not None:
        trace = Path(course.traces) / f"{name}.json.gz"
    return profile_of(lambda: built.step(inputs), trace)


def slowest(ranks: Sequence[Compared]) -> Compared:
    """A step ends when the last rank has done it, and memory must do for the rank that takes most; the profile of rank 0."""
    sides = {}
    for side, first in ranks[0].sides.items():
        of_side = [rank.sides[side] for rank in ranks]
        peaks = [found.peak_bytes for found in of_side if found.peak_bytes is not None]
        sides[side] = Measured(
            max(found.milliseconds for found in of_side), max(peaks, default=None), first.profile
        )
    return Compared(sides, max(rank.apart for rank in ranks))
