"""On cuda no step waits for the device: torch raises where one does."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch

from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_optim import AdamW, Muon, clip_grad_norm_
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed

# Said once per process, whatever is done then.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Synchronization debug mode is a prototype feature:UserWarning"
)


def parameters(world: World) -> list[Any]:
    mesh = init_device_mesh(world.device_type, (world.size,))
    grid = init_device_mesh(world.device_type, (world.size, 1))
    found = []
    for seed in range(6):
        torch.manual_seed(seed)
        where, placements = ((mesh, [Shard(0)]), (grid, [Replicate(), Shard(0)]))[seed % 2]
        values = [torch.randn(64, 48, device=world.device) for _ in range(2)]
        value, gradient = (distribute_tensor(x, where, placements) for x in values)
        value.requires_grad_(True)
        value.grad = gradient
        found.append(value)
    return found


@pytest.mark.parametrize("is_on_host", [False, True], ids=["state on the device", "state on the host"])
@pytest.mark.parametrize("rate", ["number", "on the device", "on the host"])
@pytest.mark.parametrize("kind", [AdamW, Muon], ids=["AdamW", "Muon"])
@distributed(world_size=(1, 2), backends="cuda")
def test_a_step_does_not_wait_for_the_device(world: World, kind: Any, rate: str, is_on_host: bool) -> None:
    rates = {
        "number": 0.1,
        "on the device": torch.tensor(0.1, device=world.device),
        "on the host": torch.tensor(0.1),
    }
    small = {"offload_bucket": 4096} if kind is AdamW else {"memory_cap": 2**14}
    optimizer = kind(parameters(world), lr=rates[rate], offload_state=is_on_host, **small)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@distributed(world_size=(1, 2), backends="cuda")
def test_clipping_by_a_limit_on_the_device_does_not_wait_for_it(world: World) -> None:
    given, limit = parameters(world), torch.tensor(0.1, device=world.device)
    clip_grad_norm_(given, limit)
    torch.cuda.set_sync_debug_mode("error")
    try:
        clip_grad_norm_(given, limit)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", [AdamW, Muon], ids=["AdamW", "Muon"])
@distributed(world_size=(1, 2), backends="cuda")
def test_copies_of_state_wait_for_computation_that_is_late(world: World, kind: Any) -> None:
    """The device is kept busy before every update, so that a copy that does not wait takes what was there before."""
    small = {"offload_bucket": 4096} if kind is AdamW else {"memory_cap": 2**14, "ns_dtype": "float32"}
    outcomes = []
    for is_on_host in (False, True):
        given = parameters(world)
        optimizer = kind(given, lr=0.1, offload_state=is_on_host, **small)
        platform = optimizer.platform

        def late(function: Any) -> Any:
            def called(*args: Any, **kwargs: Any) -> Any:
                torch.cuda._sleep(2_000_000)  # about a millisecond
                return function(*args, **kwargs)

            return called

        with ExitStack() as stack:
            for name in ("adamw_", "momentum_", "foreach_mul_"):
                stack.enter_context(mock.patch.object(platform, name, late(getattr(platform, name))))
            for _ in range(3):
                optimizer.step()
        state = [value.to_local() for p in given for value in optimizer.state[p].values()]
        outcomes.append([x.detach().cpu() for x in (*state, *(p.to_local() for p in given))])
    for mine, theirs in zip(*outcomes, strict=True):
        assert torch.equal(mine, theirs)
