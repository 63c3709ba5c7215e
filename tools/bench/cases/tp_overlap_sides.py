"""On a rank: one linear layer, in the plain way and in ours.

The sides take turns step by step, so that what disturbs the machine disturbs all alike, and medians are compared. Every step is
queued behind a kernel that waits for longer than the host takes to launch the step, and behind a small collective, after which
all ranks begin together: the times are those of the devices, and not the hosts' that launch. Inside of a model the host runs
ahead where the device is what takes long.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.cases.fsdp_training import device, wait
from bench.profiles import Kind, Profile
from bench.steps import profile_of, times_on_host

PRODUCT, PLAIN, OURS = "product", "plain", "ours"
SIDES = (PRODUCT, PLAIN, OURS, "copies", "uncut", "chunks")
"""The product alone; the plain program; ours as it decides; always by copies, where the ranks reach each other's memory, with products
that are cut, and with products that are not; always by collectives beside products that are cut."""
TORCH = "torch"
"""Torch's own fused operators (symmetric memory, copies between GPUs), if they are asked for: forward only, on GPUs of one host."""
# How far results may lie apart, relative to the norm: partial sums are rounded in other chunks.
TOLERANCE = {"cuda": 2e-2, "cpu": 1e-5}
CLOCKS_PER_MS = 2_000_000
"""Of the kernel that waits."""


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
    timed: int = 20
    profiled: bool = False
    with_torch: bool = False
    """Torch's operators beside, where the forward alone is measured."""
    traces: str | None = None
    """The folder."""


@dataclass(frozen=True)
class Found:
    """Of one side."""

    milliseconds: float
    """Of a step, the median."""
    hidden: float | None = None
    """The part of the communication that does not make the step longer: of what the plain program takes longer than the product alone,
    what this side does not. None where the plain one does not take longer."""
    beside: float | None = None
    """The part of the communication's time while something else runs, from a trace."""


def measure(layer: Layer, course: Course) -> dict[str, Found]:
    """All sides in turn. RuntimeError if they do not compute the same."""
    sides = (*SIDES, TORCH) if course.with_torch and layer.forward_only else SIDES
    built = {side: Built(side, layer) for side in sides}
    _compare(built)
    steps = {side: built[side].step for side in sides}
    medians = {side: statistics.median(times) for side, times in _in_turn(steps, course).items()}
    found = {}
    for side in sides:
        trace = None
        if course.traces is not None:
            trace = Path(course.traces) / f"tp-overlap-{layer.name}-{side}.json.gz"
        profile = profile_of(built[side].step, trace) if course.profiled and device() == "cuda" else None
        found[side] = Found(
            medians[side], hidden(medians, side), None if profile is None else beside(profile)
        )
    return found


def hidden(milliseconds: Mapping[str, float], side: str) -> float | None:
    """See :attr:`Found.hidden`."""
    alone, plain = milliseconds[PRODUCT], milliseconds[PLAIN]
    return None if side == PRODUCT or plain <= alone else (plain - milliseconds[side]) / (plain - alone)


def beside(profile: Profile) -> float | None:
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
        copies = OverlapPolicy(min_copied_nbytes=0, min_product=0)
        policy = {
            OURS: OverlapPolicy(),
            "copies": copies,
            "uncut": replace(copies, min_product=2**60),
            "chunks": OverlapPolicy(max_peer_nbytes=0, min_nbytes=0, features_per_peer=0),
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


def _in_turn(steps: Mapping[str, Callable[[], None]], course: Course) -> dict[str, list[float]]:
    """Milliseconds of every step of every side, which take turns."""
    import torch

    times: dict[str, list[float]] = {side: [] for side in steps}
    on_gpu = device() == "cuda"
    waits = {side: _host_milliseconds(step, course) if on_gpu else 0.0 for side, step in steps.items()}
    for _ in range(course.rounds * course.timed):
        for side, step in steps.items():
            if on_gpu:
                times[side].append(_behind_a_wait(step, waits[side]))
            else:
                torch.distributed.barrier()
                times[side].append(times_on_host(step, 1)[0])
    return times


def _host_milliseconds(step: Callable[[], None], course: Course) -> float:
    """What the host takes to launch a warm step, the longest of all ranks."""
    import torch

    for _ in range(course.warm):
        step()
    wait()
    longest = torch.tensor(max(times_on_host(step, 3)), device="cuda")
    torch.distributed.all_reduce(longest, torch.distributed.ReduceOp.MAX)
    return float(longest.item())


def _behind_a_wait(step: Callable[[], None], host_milliseconds: float) -> float:
    """Milliseconds of a step on the devices; see above. If the host was late nevertheless, it gets more time, and tries again."""
    import torch

    ready = torch.zeros(1, device="cuda")
    while True:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int((1.5 * host_milliseconds + 0.3) * CLOCKS_PER_MS))
        torch.distributed.all_reduce(ready)
        first.record()
        step()
        last.record()
        was_late = torch.tensor(float(first.query()), device="cuda")
        torch.distributed.all_reduce(was_late, torch.distributed.ReduceOp.MAX)
        if not was_late.item():
            return float(first.elapsed_time(last))
        host_milliseconds = 2.0 * host_milliseconds
