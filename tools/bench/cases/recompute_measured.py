"""On a rank: what is measured of the ways of `recompute`."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from bench.cases.recompute_settings import PARTS, Setting, Side
from bench.models.sizes import Sizes

# Of a tensor, relative to its norm: attention on GPUs adds up its gradients in any order.
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Course:
    """How often what is run."""

    rounds: int = 2
    warm: int = 2
    timed: int = 4


@dataclass(frozen=True)
class Measured:
    """Of one side."""

    milliseconds: float
    """Of forward and backward, the median over the steps of a round, and over the rounds."""
    peak_bytes: int | None
    """Of the GPU's memory, parameters and gradients included; the largest of the rounds."""


@dataclass(frozen=True)
class Share:
    """How much of what the layers save can be copied to the host while they run forward."""

    saved_bytes: int
    """Of all layers, parameters apart."""
    forward_milliseconds: float
    bytes_per_second: float
    """Of a copy to page-locked memory."""

    @property
    def value(self) -> float:
        """From 0 to 1."""
        return min(1.0, self.forward_milliseconds / 1e3 * self.bytes_per_second / self.saved_bytes)


@dataclass(frozen=True)
class Budget:
    """Of a side with a budget; see [Note: what a budget takes] in :mod:`bench.cases.recompute_budget`."""

    budget_bytes: int
    landed_bytes: int
    """That saved tensors take at the peak."""
    saved_bytes: int
    """By all layers, if all is kept."""
    predicted_milliseconds: float
    """That the plan adds to a step."""
    choices: tuple[str, ...]
    """By layer."""

    @property
    def ratio(self) -> float:
        """Landed, of the budget."""
        return self.landed_bytes / self.budget_bytes


@dataclass(frozen=True)
class Found:
    """Of a run of all rows."""

    sides: Mapping[Side, Measured]
    """Those that this version of ours has."""
    apart: Mapping[Side, float]
    """The largest distance of an output or a gradient from the plain side's, relative to its norm."""
    share: Share
    num_fitting: int
    """Layers of which the copies fit."""
    budgets: Mapping[Side, Budget] = field(default_factory=dict)
    """Of sides with a budget, where memory is counted."""


def measure(settings: Sequence[Setting], sizes: Sizes, course: Course) -> Found:
    """All sides in turn, on one rank. RuntimeError if one computes something else than the plain side."""
    from bench.cases.fsdp_training import device
    from bench.cases.recompute_sides import Layers

    chosen = list(dict.fromkeys(side for setting in settings for side in setting.sides))
    apart = _compared(chosen, replace(sizes, layers=min(sizes.layers, 3)), device())
    layers = Layers(sizes, device())
    share = _share(layers, course)
    num_fitting = int(share.value * sizes.layers)
    rounds: dict[Side, list[Measured]] = {side: [] for side in chosen}
    for _ in range(course.rounds):
        for side in chosen:
            rounds[side].append(_measured(layers, side, num_fitting, course))
    return Found(
        {side: _over(found) for side, found in rounds.items()},
        apart,
        share,
        num_fitting,
        dict(_budgets(layers, chosen)),
    )


def _budgets(layers: object, sides: Sequence[Side]) -> Iterator[tuple[Side, Budget]]:
    from bench.cases.recompute_sides import Layers

    assert isinstance(layers, Layers)
    for side in sides:
        if side in PARTS:
            from bench.cases.recompute_budget import landed

            with _cleared():
                found = landed(layers, side)
            if found is not None:
                yield side, found


def _measured(layers: object, side: Side, num_fitting: int, course: Course) -> Measured:
    import torch

    from bench.cases.fsdp_training import device, wait
    from bench.cases.recompute_sides import Layers
    from bench.steps import times_on_device

    assert isinstance(layers, Layers)
    called = layers.under(side, num_fitting)
    with _cleared():
        for _ in range(course.warm):
            layers.step(called)
        wait()
        on_gpu = device() == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        times = times_on_device(lambda: layers.step(called), course.timed)
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return Measured(statistics.median(times), peak)


@contextmanager
def _cleared() -> Iterator[None]:
    """Nothing of the sides before is on the GPU."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    yield


def _compared(sides: Sequence[Side], sizes: Sizes, device: str) -> dict[Side, float]:
    import torch

    from bench.cases.recompute_sides import Layers

    layers = Layers(sizes, device)

    def results(side: Side) -> list[torch.Tensor]:
        called = layers.under(side, sizes.layers - 1)
        for _ in range(2):  # the order of groups is known from the second step on
            y = layers.step(called)
        grads = [leaf.grad for leaf in layers.leaves]
        return [y, *(grad.clone() for grad in grads if grad is not None)]

    expected, apart = results(Side.PLAIN), {}
    for side in sides:
        found = results(side)
        if len(found) != len(expected):
            raise RuntimeError(f"{side.value} gives {len(found) - 1} gradients, plain {len(expected) - 1}")
        distances = [
            float(((one.float() - other.float()).norm() / other.float().norm()).item())
            for one, other in zip(found, expected, strict=True)
        ]
        apart[side] = max(distances)
        if not all(each <= TOLERANCE for each in distances):  # not for nan either
            raise RuntimeError(
                f"the sides do not compute the same: {side.value} differs from plain by {max(distances):.2e} of a tensor's norm, at most "
                f"{TOLERANCE:g} is rounding; a ratio of their times would mean nothing"
            )
    return apart


def _share(layers: object, course: Course) -> Share:
    import torch

    from bench.cases.recompute_sides import Layers
    from bench.steps import times_on_device

    assert isinstance(layers, Layers)
    plain, saved = layers.under(Side.PLAIN, 0), {}
    parameters = {leaf.untyped_storage().data_ptr() for leaf in layers.leaves[1:]}

    def note(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        y = layers.forward(plain)
    del y
    forward = statistics.median(times_on_device(lambda: layers.forward(plain), course.timed))
    source = torch.empty(
        2**28 if torch.cuda.is_available() else 2**20, dtype=torch.uint8, device=layers.x.device
    )
    target = torch.empty(source.shape, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    copies = times_on_device(lambda: target.copy_(source, non_blocking=True), course.timed)
    return Share(sum(saved.values()), forward, source.numel() / (statistics.median(copies) / 1e3))


def _over(rounds: Sequence[Measured]) -> Measured:
    peaks = [each.peak_bytes for each in rounds if each.peak_bytes is not None]
    return Measured(statistics.median(each.milliseconds for each in rounds), max(peaks, default=None))
