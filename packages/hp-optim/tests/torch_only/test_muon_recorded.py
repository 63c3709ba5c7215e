"""A step of Muon from records of launches: the same bits as launch by launch, whatever changes from step to step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_optim import Muon
from hp_optim.muon.devices import Devices
from hp_platform import init_device_mesh
from hp_platform.repeated import RepeatedWork, WorkAsItIs
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from host_graphs import HostRecorder, Memory, touched

SHAPES = ((8, 12), (4, 12), (8, 12), (12, 8), (2, 4, 6))


def momentum_(momenta: Any, grads: Any, directions: Any, *, momentum: float, nesterov: bool) -> None:
    """As a kernel: without memory of its own."""
    for m, g, d in zip(momenta, grads, directions, strict=True):
        m.mul_(momentum).add_(g)
        d.copy_(m)
        if nesterov:
            d.mul_(momentum).add_(g)


def move_by_(params: Any, updates: Any, numbers: torch.Tensor) -> None:
    """As a kernel: numbers are read where they lie."""
    for p, u in zip(params, updates, strict=True):
        p.mul_(numbers[0])
        p.addcmul_(u, numbers[1].expand(u.shape))


@contextmanager
def recorded(world: World, *, is_on: bool) -> Iterator[list[Any]]:
    """As on a device that keeps launches; what was made to keep them."""
    platform, made = world.platform, []
    supports = platform.supports

    def repeated(devices: Devices, device: str) -> Any:
        if device not in devices._repeated:
            devices._repeated[device] = RepeatedWork(HostRecorder()) if is_on else WorkAsItIs()
            made.append(devices._repeated[device])
        return devices._repeated[device]

    memory, norm = Memory(), platform.norm

    def empty(shape: Any, dtype: Any, device: str) -> torch.Tensor:
        return memory.empty(shape, platform.dtype(dtype))

    def norm_of(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = norm(*args, **kwargs)
        return memory.empty(found.shape, found.dtype).copy_(found)

    def has(name: str, device: str | None = None) -> bool:
        return name == "numbers_on_device" or supports(name, device)

    with ExitStack() as stack:
        for place, name, value in (
            (platform, "supports", has),
            (platform, "empty", empty),
            (platform, "norm", norm_of),
            (platform, "momentum_", momentum_),
            (platform, "move_by_", move_by_),
            (Devices, "repeated", repeated),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        yield made


def parameters(world: World, placements: Sequence[Any], mesh_shape: tuple[int, ...]) -> list[Any]:
    mesh = init_device_mesh(world.device_type, mesh_shape)
    found = []
    for seed, shape in enumerate(SHAPES * 2):
        value = torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))
        found.append(distribute_tensor(value, mesh, placements).requires_grad_(True))
    return found


def steps(
    world: World, placements: Sequence[Any], mesh_shape: tuple[int, ...], **options: Any
) -> list[torch.Tensor]:
    """Parameters and momenta after steps whose learning rate, gradients and addresses change."""
    params = parameters(world, placements, mesh_shape)
    groups = [{"params": params[:6]}, {"params": params[6:], "weight_decay": 0.0, "nesterov": False}]
    optimizer = Muon(groups, lr=0.1, memory_cap=2**13, **options)
    held = []
    for step in range(10):
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] = 0.1 / (1 + step // 2 + number)
        for seed, p in enumerate(params):
            random = np.random.default_rng(100 * step + seed)
            value = torch.from_numpy(random.normal(size=tuple(p.shape)).astype(np.float32))
            gradient = distribute_tensor(value, p.device_mesh, p.placements)
            if step in (5, 7) or p.grad is None:
                held.append(p.grad)  # such that the next one lies elsewhere
                p.grad = gradient
            else:
                p.grad.to_local().copy_(gradient.to_local())
            if step in (4, 8) and seed in (1, 7):
                p.grad = None
        before = [p.to_local()._version for p in params]
        optimizer.step()
        for p, version in zip(params, before, strict=True):
            assert (p.to_local()._version > version) == (p.grad is not None)
    momenta = [optimizer.state[p]["momentum_buffer"] for p in params]
    return [x.to_local().detach().clone() for x in (*params, *momenta)]


@pytest.mark.parametrize("kind", ["rows", "columns", "replicated", "both"])
@distributed(world_size=(1, 2), backends="torch")
def test_steps_from_records_give_the_bits_of_steps_launch_by_launch(world: World, kind: str) -> None:
    n = world.size
    placements, mesh_shape = {
        "rows": ([Shard(0)], (n,)),
        "columns": ([Shard(1)], (n,)),
        "replicated": ([Replicate()], (n,)),
        "both": ([Replicate(), Shard(0)], (n, 1)),
    }[kind]
    ends = []
    for is_on in (False, True):
        with recorded(world, is_on=is_on) as made:
            ends.append(steps(world, placements, mesh_shape))
        if is_on:
            (kept,) = made
            assert kept.failures == {}
            assert kept.num_launched > 20
    for plain, again in zip(*ends, strict=True):
        assert torch.isfinite(plain).all()
        assert torch.equal(plain, again)


@distributed(world_size=(1, 2), backends="torch")
def test_a_function_in_the_place_of_the_iteration_runs_anew_between_records(world: World) -> None:
    ends, calls = [], []

    def doubled(stack: torch.Tensor) -> torch.Tensor:
        calls.append(stack.shape)
        return stack.mul_(2.0) if stack.shape[1] == 8 else stack * 2.0

    for is_on in (False, True):
        with recorded(world, is_on=is_on) as made:
            ends.append(steps(world, [Shard(0)], (world.size,), ns_transform_fn=doubled))
    (kept,) = made
    assert kept.failures == {}
    assert kept.num_launched > 0
    first, second = calls[: len(calls) // 2], calls[len(calls) // 2 :]
    assert first == second
    for plain, again in zip(*ends, strict=True):
        assert torch.equal(plain, again)


@distributed(world_size=2, backends="torch")
def test_records_touch_nothing_but_what_their_name_says(world: World) -> None:
    with recorded(world, is_on=True) as made:
        steps(world, [Shard(0)], (2,))
    (kept,) = made
    names = {key[0][0] for key in kept._records if isinstance(key[0][0], str)}
    assert names == {"pack", "join", "return", "apply"}
    for (_, _, *layouts), found in kept._records.items():
        ranges = []
        for address, dtype, shape, stride in layouts:
            last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
            ranges.append((address, address + (last + 1) * dtype.itemsize))
        for place in touched(found.record):
            last = sum((n - 1) * step for n, step in zip(place.shape, place.stride, strict=True))
            end = place.address + (last + 1) * place.dtype.itemsize
            assert any(first <= place.address and end <= behind for first, behind in ranges)


@distributed(world_size=1, backends="torch")
def test_a_step_that_the_caller_records_leaves_the_learning_rate_of_the_next_one_alone(world: World) -> None:
    with recorded(world, is_on=True) as made:
        params = parameters(world, [Shard(0)], (1,))[:4]
        for p in params:
            p.grad = distribute_tensor(torch.ones(p.shape), p.device_mesh, p.placements)
        optimizer = Muon(params, lr=0.1)
        for _ in range(3):
            optimizer.step()

        def on_device() -> list[list[float]]:
            return [each.tensor.tolist() for each in optimizer._plans.devices._numbers.values()]

        before, launched = on_device(), made[0].num_launched
        assert before
        optimizer.param_groups[0]["lr"] = 0.05
        HostRecorder.is_recorded = True
        try:
            # On a device its writes come when the caller's record is launched, and it may never be.
            optimizer.step()
        finally:
            HostRecorder.is_recorded = False
        assert on_device() == before and made[0].num_launched == launched
        optimizer.step()
        assert made[0].num_launched > launched
        for now, then in zip(on_device(), before, strict=True):
            assert now[1] == pytest.approx(then[1] / 2, rel=1e-6)


MOST_PER_MATRIX = 30
"""Calls of our own functions for a matrix in a step: looking at its parameter, gradient and momentum, and at where they lie."""
MOST_PER_STEP = 300
"""Of all else, in a step of one batch with two stacks."""


def calls_of_a_step(optimizer: Any) -> int:
    """How many of our functions in Python a step calls."""
    count = 0

    def seen(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count = count + (event == "call" and "/hp_" in frame.f_code.co_filename)

    sys.setprofile(seen)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return count


@distributed(world_size=(1, 2), backends="torch")
def test_a_matrix_more_asks_little_more_of_the_host(world: World) -> None:
    mesh, found = init_device_mesh(world.device_type, (world.size,)), []
    for number in (8, 24):
        with recorded(world, is_on=True) as made:
            values = [torch.randn(8, 4 + 4 * (at % 2)) for at in range(number)]
            params = [distribute_tensor(x, mesh, [Shard(0)]).requires_grad_(True) for x in values]
            for p, value in zip(params, values, strict=True):
                p.grad = distribute_tensor(value, mesh, [Shard(0)])
            optimizer = Muon(params)
            for _ in range(4):
                optimizer.step()
            launched = made[0].num_launched
            found.append(calls_of_a_step(optimizer))
            # A batch: momentum, joining, two stacks, update; with another rank the way back. However many matrices.
            assert made[0].num_launched - launched == (5 if world.size == 1 else 6)
    few, many = found
    per_matrix = (many - few) / 16
    assert per_matrix <= MOST_PER_MATRIX
    assert few - 8 * per_matrix <= MOST_PER_STEP
