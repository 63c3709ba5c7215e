"""Units that keep whole parameters behind backward, and ranks without a piece of some: all gather anew after a step."""

from __future__ import annotations

from typing import Any

import pytest

from hp_fsdp import fully_shard
from hp_fsdp.unit import units_in
from hp_optim import AdamW, Muon
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed


def row(world: World) -> Any:
    platform = world.platform

    class Row(platform.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = platform.parameter(platform.full((1, 4), 0.5, "float32", world.device))

        def forward(self, x: Any) -> Any:
            return platform.linear(x, self.weight)

        construct = forward

    return Row()


@pytest.mark.parametrize("kind", [AdamW, Muon])
@distributed(world_size=2)
def test_a_rank_without_elements_counts_a_step_as_the_others_do(world: World, kind: Any) -> None:
    platform = world.platform
    # Where writes are not counted all is gathered anew, with the same losses.
    counts = platform.supports("version_counter", world.device)
    model = fully_shard(row(world), init_device_mesh(world.device_type, (2,)))
    model.set_reshard_after_backward(False)
    x = platform.full((2, 4), 1.0, "float32", world.device)
    optimizer = kind([parameter for _, parameter in platform.named_parameters(model)], lr=0.1)
    (unit,) = units_in(platform, model)
    losses = []
    for _ in range(3):
        loss = platform.sum(model(x))
        losses.append(float(platform.to_numpy(platform.detach(loss))))
        before = unit.shard_versions() if counts else None
        platform.backward([loss])
        optimizer.step()
        optimizer.zero_grad()
        if counts:
            assert unit.shard_versions() != before
    assert losses[0] > losses[1] > losses[2]
