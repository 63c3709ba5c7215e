"""Optimizers of what fully_shard makes of parameters, with their state on the host: rows, pieces of replicas, checkpoints, chains."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hp_dtensor import DTensor
from hp_fsdp import fully_shard, get_optimizer_state_dict, set_optimizer_state_dict
from hp_optim import AdamW, get_hyper_optimizer
from hp_optim.offload.late import TIMINGS
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from optim_checkpoints import gone_on_from
from optim_twins import Shadow, make_model, mesh_of, replica_counts, widest

ON_HOST = {"offload_state": True, "offload_bucket": 4096}
"""256 float64 pairs of moments: a row has several."""


def kinds(world: World) -> Iterator[Any]:
    """AdamW, and such whose copies are late or early, where a copy may go into a part of a tensor."""
    yield AdamW
    if world.platform.supports("write_into_view", world.device):
        for timing in TIMINGS:
            yield type("AdamW", (AdamW,), {"MAKE_TRANSFERS": staticmethod(timing)})


def check_place(twins: Shadow) -> None:
    for parameter in twins.parameters.values():
        for value in (twins.optimizer.state.get(parameter) or {}).values():
            if isinstance(value, DTensor) and twins.platform.supports("streams", twins.world.device):
                assert twins.platform.device_of(value.to_local()) == "cpu"


@distributed(world_size=(2, 3, 4), timeout=240)
def test_rows_and_pieces_have_the_bits_of_whole_tensors(world: World) -> None:
    for replicas in replica_counts(world):
        for kind in kinds(world):
            twins = Shadow(world, mesh_of(world, replicas), kind=kind, options={**ON_HOST, "amsgrad": True})
            for step, uses_extra in enumerate((True, False, True)):
                twins.backward(step, uses_extra=uses_extra)
                twins.update()
                twins.check()
                check_place(twins)
            twins.optimizer.param_groups[0]["offload_state"] = False
            twins.backward(3)
            twins.update()
            twins.optimizer.param_groups[0]["offload_state"] = True
            twins.backward(4)
            twins.update()
            twins.check()
            check_place(twins)


@distributed(world_size=(1, 4), timeout=240)
def test_checkpoints_go_between_state_on_the_host_and_beside_the_parameters(
    world: World, tmp_path: Path
) -> None:
    counts = replica_counts(world)
    for number, (own, other) in enumerate(((ON_HOST, {}), ({}, ON_HOST))):
        before = Shadow(world, mesh_of(world, counts[0]), options=own)
        for step in range(2):
            before.backward(step, uses_extra=False)
            before.update()
        saved = get_optimizer_state_dict(before.model, before.optimizer)
        place = tmp_path / f"{world.size}_{number}"
        after = gone_on_from(before, saved, place, mesh_of(world, counts[-1]), other)
        assert after.optimizer.param_groups[0]["offload_state"] is bool(other)
        if other:  # not by way of the device, which may have no room
            check_place(after)
        for step in range(2, 4):
            after.backward(step, uses_extra=step > 2)
            after.update()
            after.check()
        if other:
            check_place(after)
            # Into state that is in use: written where it lies.
            set_optimizer_state_dict(after.model, after.optimizer, saved)
            check_place(after)


@distributed(world_size=(1, 2), timeout=240)
def test_a_chain_passes_it_on_to_both_optimizers(world: World) -> None:
    platform = world.platform
    outcomes = []
    for is_on_host in (False, True):
        model = make_model(world, widest(world))
        for unit in (model.first, model.second, model):
            fully_shard(unit, mesh_of(world, 0))
        options = {"lr": 0.05, "offload_state": is_on_host}
        muon = {f"muon_{key}": value for key, value in options.items()}
        chain = get_hyper_optimizer(model, muon_kwargs={**muon, "ns_dtype": "float32"}, adamw_kwargs=options)
        for step in range(2):
            x = np.random.default_rng(step).uniform(-1, 1, (3, 4))
            output = model(platform.tensor(x, widest(world), world.device))
            platform.backward([platform.mean(output * output)])
            chain.step()
            chain.zero_grad()
        state = chain.state_dict()
        assert len(state) > 0
        for optimizer in chain:
            for entry in optimizer.state.values():
                for value in entry.values():
                    if isinstance(value, DTensor) and platform.supports("streams", world.device):
                        assert (platform.device_of(value.to_local()) == "cpu") is is_on_host
        named = platform.named_parameters(model)
        outcomes.append([platform.to_bits(platform.detach(p.to_local())) for _, p in named])
    for mine, theirs in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@distributed(world_size=1, backends="cuda", timeout=240)
def test_a_step_takes_three_buckets_of_memory_and_the_state_none(world: World) -> None:
    import torch

    handle, MIB = world.platform.device("cuda"), 2**20
    bucket = 8 * MIB
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False, device="cuda") for _ in range(8)])
    for layer in model:
        fully_shard(layer, mesh_of(world, 0))
    fully_shard(model, mesh_of(world, 0))
    optimizer = AdamW(model.parameters(), offload_state=True, offload_bucket=bucket)

    def backward() -> None:
        model(torch.ones(4, 2048, device="cuda")).square().mean().backward()

    for _ in range(2):
        backward()
        torch.cuda.synchronize()
        before = handle.memory_allocated()
        handle.reset_peak_memory()
        optimizer.step()
        torch.cuda.synchronize()
        # 128 MiB of parameters have 256 MiB of moments.
        assert handle.max_memory_allocated() - before <= 3 * bucket + MIB
        assert handle.memory_allocated() - before <= MIB
        optimizer.zero_grad()
