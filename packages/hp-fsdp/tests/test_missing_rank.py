"""A rank that leaves a step is named to those who wait for it, with the units."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import hp_platform
from hp_fsdp import fully_shard
from hp_platform import CollectiveTimeoutError
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import Maker, make_mesh

SECONDS = 2
# On npu and cuda the backend's own watchdog ends the process at a time-out; it cannot be caught.
CATCHABLE = ("torch", "mindspore")


def build(maker: Maker) -> Any:
    def setup(module: Any) -> None:
        module.layers = maker.platform.ModuleList([maker.linear(4, 4) for _ in range(3)])
        module.stops_behind: Any = None

    def forward(module: Any, x: Any, rank: int) -> Any:
        for at, layer in enumerate(module.layers):
            x = layer(x)
            if module.stops_behind == at:
                raise RuntimeError("on purpose")
        return x

    return maker.model(setup, forward)


@distributed(world_size=2, init=False, backends=CATCHABLE)
def test_who_waits_for_a_rank_that_has_left_the_step_is_told_in_which_unit(world: World) -> None:
    hp_platform.init_process_group(timeout=timedelta(seconds=SECONDS))
    platform, maker = world.platform, Maker(world)
    model, mesh = build(maker), make_mesh(world)
    for layer in model.layers:
        fully_shard(layer, mesh)
    fully_shard(model, mesh)
    x = platform.full((2, 4), 0.5, maker.dtype, world.device)
    store = hp_platform.get_world().tables.store  # type: ignore[union-attr]
    if world.rank == 1:
        model.stops_behind = 0
        with pytest.raises(RuntimeError, match="on purpose"):
            model(x, rank=1)
        deadline = time.monotonic() + 30
        while platform.store_get(store, "seen") is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return
    with pytest.raises(CollectiveTimeoutError) as caught:
        model(x, rank=0)
    platform.store_set(store, "seen", b"yes")
    assert str(caught.value).splitlines()[-1] == (
        "rank 1 has not come: the last it started on this group is all_gather (gather of Linear 'layers.0') number 1"
    )
    assert caught.value.__context__ is None or not isinstance(
        caught.value.__context__, CollectiveTimeoutError
    )
