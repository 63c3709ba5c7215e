"""On a rank: one linear layer, in the plain way and in ours.

Every step of a side is queued behind a kernel that waits for a while, so that the times are those of the device, and not the host's
that launches: inside of a model the host runs ahead where the device is what takes long.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.cases.fsdp_training import device, wait
from bench.profiles import Kind, Profile
from bench.steps import profile_of, times_on_host

PRODUCT, PLAIN = "product", "plain"
SIDES = (PRODUCT, PLAIN, "ours", "cut", "sends", "halves", "quarters")
"""The product alone; the plain program; ours as it decides; always cut: beside one all-gather and in as many chunks as it takes by
itself, with pieces sent one by one, and reduced in two and in four chunks. Where there is nothing to send, or to reduce,
they are `cut` again."""
TORCH = "torch"
"""Torch's own fused operators (symmetric memory, copies between GPUs), if they are asked for: forward only, on GPUs of one host."""
# How far results may lie apart, relative to the norm: partial sums are rounded in other chunks.
TOLERANCE = {"cuda": 2e-2, "cpu": 1e-5}
CLOCKS_BEFORE = 20_000_000
"""Of the kernel that waits: some 10 ms, in which the host launches all steps."""


@dataclass(frozen=True)
class Layer:
    """A linear layer, its whole sizes, and how it is cut."""

    name: str
    features_in: int
    features_out: int
    by_columns: bool
    length: int
    forward_only: bool

    def tiny(self) -> Layer:
        """For a machine without GPUs."""
        return replace(
            self,
            name=f"tiny-{self.name}",
            features_in=self.features_in // 64,
            features_out=self.features_out // 64,
            length=self.length // 64,
        )


@dataclass(frozen=True)
class Course:
    """How often what is run."""

    rounds: int = 3
    warm: int = 3
    timed: int = 10
    profiled: bool = False
    with_torch: bool = False
    """Torch's operators beside, where the forward alone is measured."""
    traces: str | None = None
    """The folder."""


@dataclass(frozen=True)
class Found:
    """Of one side."""

    milliseconds: float
    """Of a step, the median over the rounds of the mean in a round."""
    hidden: float | None = None
    """The part of the communication's time while computation runs, too."""


def measure(layer: Layer, course: Course) -> dict[str, Found]:
    """All sides in turn. RuntimeError if they do not compute the same."""
    sides = (*SIDES, TORCH) if course.with_torch and layer.forward_only else SIDES
    built = {side: Built(side, layer) for side in sides}
    _compare(built)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(course.rounds):
        for side in sides:
            times[side].append(_one_round(built[side].step, course))
    found = {}
    for side in sides:
        trace = None
        if course.traces is not None:
            trace = Path(course.traces) / f"tp-overlap-{layer.name}-{side}.json.gz"
        profile = profile_of(built[side].step, trace) if course.profiled and device() == "cuda" else None
        found[side] = Found(statistics.median(times[side]), None if profile is None else hidden(profile))
    return found


def hidden(profile: Profile) -> float | None:
    """The part of the communication's time while something is computed; None without communication."""
    communicating = profile.busy.get(Kind.GATHER, 0.0) + profile.busy.get(Kind.REDUCE, 0.0)
    return None if communicating == 0 else 1.0 - profile.exposed / communicating


class Built:
    """A side's tensors and its step."""

    def __init__(self, side: str, layer: Layer) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.side, self.layer = torch, side, layer
        world, rank = dist.get_world_size(), dist.get_rank()
        dtype = torch.bfloat16 if device() == "cuda" else torch.float32
        generator = torch.Generator(device()).manual_seed(0)

        def whole(*shape: int) -> Any:
            return torch.randn(shape, device=device(), generator=generator)

        weight = whole(layer.features_out, layer.features_in) / layer.features_in**0.5
        x, grad = whole(1, layer.length, layer.features_in), whole(1, layer.length, layer.features_out)
        features, rows = (0, 2) if layer.by_columns else (1, 1)

        def piece(of: Any, dim: int) -> Any:
            return of.chunk(world, dim)[rank].to(dtype).contiguous()

        # By columns a piece of the sequence goes in and one of the features comes out, by rows the other way round.
        is_alone = side == PRODUCT
        self.weight = piece(weight, features).requires_grad_(not layer.forward_only)
        x = (x.to(dtype) if is_alone else piece(x, 1)) if layer.by_columns else piece(x, 2)
        self.grad = grad.to(dtype) if is_alone and not layer.by_columns else piece(grad, rows)
        self.x = x.requires_grad_(not layer.forward_only)
        self._run = self._forward(world, rank)

    def _forward(self, world: int, rank: int) -> Callable[[], Any]:
        from hp_dtensor import conversions
        from hp_dtensor.chunk import chunk_sizes
        from hp_platform import get_world
        from hp_tp.overlap import OverlapPolicy, all_gather_matmul, matmul_reduce_scatter

        x, weight, linear = self.x, self.weight, self.torch.nn.functional.linear
        if self.side == PRODUCT:
            return lambda: linear(x, weight)
        if self.side == TORCH:
            return self._fused_forward()
        group, sizes = get_world(), chunk_sizes(self.layer.length, world)
        cut = conversions.Cut(group, tuple(range(world)), rank, 1, sizes)
        if self.side == PLAIN and self.layer.by_columns:
            return lambda: linear(conversions.gather_varying(x, cut), weight)
        if self.side == PLAIN:
            return lambda: conversions.reduce_scatter(linear(x, weight), cut)
        always = OverlapPolicy(min_nbytes=0, features_per_peer=0)
        policy = {
            "ours": OverlapPolicy(),
            "cut": always,
            "sends": replace(always, gather_by="sends"),
            "halves": replace(always, chunk_nbytes=0, max_chunks=2),
            "quarters": replace(always, chunk_nbytes=0, max_chunks=4),
        }[self.side]
        if self.layer.by_columns:
            return lambda: all_gather_matmul(x, [weight], cut, policy=policy)[0][0]
        return lambda: matmul_reduce_scatter(x, weight, cut, policy=policy)

    def _fused_forward(self) -> Callable[[], Any]:
        import torch.distributed._symmetric_memory as symmetric_memory

        name = self.torch.distributed.group.WORLD.group_name
        symmetric_memory.enable_symm_mem_for_group(name)
        operators, factor = self.torch.ops.symm_mem, self.weight.t()
        if self.layer.by_columns:
            return lambda: operators.fused_all_gather_matmul(self.x, [factor], 1, name)[1][0]
        return lambda: operators.fused_matmul_reduce_scatter(self.x, factor, "sum", 1, name)

    def step(self) -> None:
        """Forward, and backward if it is asked for; gradients are dropped."""
        if self.layer.forward_only:
            with self.torch.no_grad():
                self._run()
            return
        self._run().backward(self.grad)
        self.x.grad = self.weight.grad = None

    def results(self) -> list[Any]:
        """Output and gradients of this rank."""
        if self.layer.forward_only:
            with self.torch.no_grad():
                return [self._run()]
        y = self._run()
        y.backward(self.grad)
        found = [y.detach(), self.x.grad, self.weight.grad]
        self.x.grad = self.weight.grad = None
        return found


def _compare(built: dict[str, Built]) -> None:
    expected = built[PLAIN].results()
    for side in built:
        if side in (PRODUCT, PLAIN):
            continue
        for name, found, wanted in zip(
            ("output", "gradient of the input", "gradient of the weight"),
            built[side].results(),
            expected,
            strict=False,
        ):
            apart = float(((found.float() - wanted.float()).norm() / wanted.float().norm()).item())
            if not apart <= TOLERANCE[device()]:  # not for nan either
                raise RuntimeError(
                    f"{built[side].layer}: the {name} of {side} differs from the plain program's by {apart:.2e} of its norm; a "
                    f"ratio of their times would mean nothing"
                )


def _one_round(step: Callable[[], None], course: Course) -> float:
    """Milliseconds of a step of the device."""
    import torch

    for _ in range(course.warm):
        step()
    wait()
    torch.distributed.barrier()
    wait()
    if device() != "cuda":
        return statistics.mean(times_on_host(step, course.timed))
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(CLOCKS_BEFORE)
    first.record()
    for _ in range(course.timed):
        step()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last) / course.timed)
