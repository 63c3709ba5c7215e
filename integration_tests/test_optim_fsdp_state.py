"""The state of an AdamW of sharded parameters, saved by their names, and loaded on another mesh or into rows that are in use."""

from __future__ import annotations

import sys
from pathlib import Path

import hp_dtensor
from hp_dtensor import DTensor
from hp_fsdp import get_optimizer_state_dict, set_optimizer_state_dict
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from optim_checkpoints import gone_on_from
from optim_twins import Shadow, mesh_of, replica_counts


@distributed(world_size=(1, 2, 3, 4), timeout=240)
def test_state_by_names_is_saved_and_goes_on_on_another_mesh(world: World, tmp_path: Path) -> None:
    """Written from one mesh, read into another; a parameter without state stays without, until it has a gradient."""
    counts = replica_counts(world)
    for number, (first, second) in enumerate(zip(counts, [*counts[1:], counts[0]], strict=True)):
        before = Shadow(world, mesh_of(world, first))
        for step in range(2):
            before.backward(step, uses_extra=False)
            before.update()
        saved = get_optimizer_state_dict(before.model, before.optimizer)
        assert "first.extra.weight" not in saved["state"]
        place = tmp_path / f"{world.size}_{number}"
        after = gone_on_from(before, saved, place, mesh_of(world, second), {"lr": 0.7})
        for step in range(2, 5):
            after.backward(step, uses_extra=step > 2)
            after.update()
            after.check()
        assert after.optimizer.param_groups[0]["lr"] == 0.05


@distributed(world_size=(2, 4), timeout=240)
def test_state_is_written_into_rows_that_are_in_use(world: World) -> None:
    for replicas in (0, 2):
        twins = Shadow(world, mesh_of(world, replicas))
        twins.backward(0)
        twins.update()
        kept = {n: world.platform.clone(twins.whole(p)) for n, p in twins.parameters.items()}
        saved = get_optimizer_state_dict(twins.model, twins.optimizer)
        saved = {
            "param_groups": saved["param_groups"],
            "state": {
                name: {
                    key: value.full_tensor() if isinstance(value, DTensor) else value
                    for key, value in entry.items()
                }
                for name, entry in saved["state"].items()
            },
        }
        saved = {
            **saved,
            "state": {
                name: {
                    key: world.platform.clone(value) if world.platform.is_tensor(value) else value
                    for key, value in entry.items()
                }
                for name, entry in saved["state"].items()
            },
        }
        reference = Shadow(world, mesh_of(world, replicas))
        for step in range(2):
            reference.backward(step)
            reference.update()
        for step in range(1, 3):
            twins.backward(step)
            twins.optimizer.step()
            twins.optimizer.zero_grad()
        set_optimizer_state_dict(twins.model, twins.optimizer, saved)
        for name, parameter in twins.parameters.items():
            local = parameter.to_local()
            if tuple(parameter.shape):
                given = hp_dtensor.distribute_tensor(
                    kept[name], parameter.device_mesh, parameter.placements
                ).to_local()
            else:
                given = kept[name]
            world.platform.copy_(local, world.platform.detach(given))
        twins.backward(1)
        twins.optimizer.step()
        for name, parameter in twins.parameters.items():
            reference.equal(parameter, reference.parameters[name])
