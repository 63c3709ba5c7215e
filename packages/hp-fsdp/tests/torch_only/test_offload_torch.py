"""torch's optimizers, norms and full_tensor on shards that wait on the host."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from hp_fsdp.unit import units_in
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from torch_models import batch, gradients, loss_of, make, make_mesh, parameters, shard

OFFLOADING = ("torch", "cuda", "npu")
OPTIMIZERS: dict[str, Any] = {
    "AdamW, lists": lambda ps: torch.optim.AdamW(ps, 1e-2, weight_decay=0.1, foreach=True),
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, 1e-2, weight_decay=0.1, fused=True),
    "AdamW, one by one": lambda ps: torch.optim.AdamW(ps, 1e-2, weight_decay=0.1, foreach=False),
    "SGD": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
}


def wide(world: World) -> bool:
    return world.platform.supports("float64_compute", world.device)


def close(world: World) -> dict[str, float]:
    """Other orders of sums; Adam divides by the root of squares, which magnifies the last places of small gradients."""
    return {"rtol": 0.0, "atol": 1e-12 if wide(world) else 2e-5}


def models(world: World) -> tuple[Any, Any]:
    """One process, and sharded with the shards on the host."""
    reference, model = (each if wide(world) else each.float() for each in (make(world), make(world)))
    return reference, shard(model, make_mesh(world), offload_policy=CPUOffloadPolicy())


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@distributed(world_size=2, backends=OFFLOADING)
def test_optimizers_and_their_states_are_on_the_host_and_step_as_in_one_process(
    world: World, name: str
) -> None:
    both = models(world)
    optimizers = [OPTIMIZERS[name](each.parameters()) for each in both]
    for step in range(3):
        for each, optimizer, samples in zip(both, optimizers, batch(world, step), strict=True):
            loss_of(each, samples).backward()
            norm = torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            if each is both[0]:
                expected = norm
        assert_parity(norm, expected.to("cpu"), **close(world), name=f"norm of step {step}")
    assert_parity(parameters(both[1]), parameters(both[0]), **close(world))
    state = optimizers[1].state_dict()["state"].values()
    held = [x for entry in state for x in entry.values() if isinstance(x, torch.Tensor)]
    assert held
    assert {x.device.type for x in held} == {"cpu"}


@distributed(world_size=2, backends=OFFLOADING)
def test_a_shard_on_the_host_can_be_made_whole_there(world: World) -> None:
    reference, model = models(world)
    for each, samples in zip((reference, model), batch(world, 0), strict=True):
        loss_of(each, samples).backward()
    wholes = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    assert {x.device.type for x in wholes.values()} == {"cpu"}
    for name, parameter in reference.named_parameters():
        assert torch.equal(wholes[name], parameter.detach().cpu()), name
    assert_parity(gradients(model), gradients(reference), **close(world))


@distributed(world_size=2, backends=OFFLOADING)
def test_rows_are_pinned_and_shards_lie_in_them(world: World) -> None:
    _, model = models(world)
    loss_of(model, batch(world, 0)[1]).backward()
    if world.device_type == "cpu":
        return
    for unit in units_in(world.platform, model):
        for buffer in (*unit.arrangement.buffers, *unit.arrangement.replicated_rows):
            assert buffer.row().is_pinned()
            start, end = buffer.row().data_ptr(), buffer.row().data_ptr() + buffer.row().nbytes
            assert all(
                start <= param.shard.data_ptr() < end for param in buffer.params if param.shard.numel()
            )
    assert all(p.grad.to_local().is_pinned() for p in model.parameters() if p.grad is not None)


@distributed(world_size=1, backends=OFFLOADING)
def test_moving_the_model_after_sharding_is_refused_with_the_names(world: World) -> None:
    _, model = models(world)
    if world.device_type == "cpu":
        loss_of(model.to("cpu"), batch(world, 0)[1]).backward()
        return
    with pytest.raises(RuntimeError, match="cpu"):
        loss_of(model.to(world.device), batch(world, 0)[1])


@distributed(world_size=1, backends="cuda")
def test_copies_from_and_to_pinned_memory_run_beside_the_computation(world: World) -> None:
    """A block computes longer than its 134 MB of float32 pieces travel, so most of the copies can be hidden."""
    width, num_rows = 2048, 32768

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(width, 4 * width, device=world.device)
            self.outer = torch.nn.Linear(4 * width, width, device=world.device)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.outer(torch.nn.functional.silu(self.inner(x)))

    model = torch.nn.Sequential(*[Wide() for _ in range(6)])
    low = MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="float32")
    for block in model:
        fully_shard(block, make_mesh(world), mp_policy=low, offload_policy=CPUOffloadPolicy())
    fully_shard(model, make_mesh(world), mp_policy=low, offload_policy=CPUOffloadPolicy())
    x = torch.ones(num_rows, width, device=world.device)

    def step() -> None:
        model(x).float().square().mean().backward()
        model.zero_grad()

    for _ in range(3):
        step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        step()
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    ranges = [(e.name, e.time_range.start, e.time_range.end) for e in on_device]
    kernels = [
        (start, end) for name, start, end in ranges if not name.startswith(("Memcpy", "Memset", "hp_fsdp"))
    ]
    for kind in ("Memcpy HtoD", "Memcpy DtoH"):
        large = [(n, a, b) for n, a, b in ranges if n.startswith(kind) and b - a > 500]
        assert len(large) >= 5, (kind, ranges)
        assert all("Pinned" in name for name, _, _ in large), large
        total = sum(end - start for _, start, end in large)
        hidden = sum(covered(start, end, kernels) for _, start, end in large)
        assert hidden > 0.6 * total, f"{kind}: {hidden:.0f} of {total:.0f} us beside kernels"


def covered(start: float, end: float, others: list[tuple[float, float]]) -> float:
    """How much of a range the others cover together."""
    found, reached = 0.0, start
    for a, b in sorted(others):
        a, b = max(a, reached), min(b, end)
        if b > a:
            found = found + b - a
            reached = b
    return found
