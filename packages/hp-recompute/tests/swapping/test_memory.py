"""Memory of the host and of the device behind swapped storages."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_platform.testing import World, distributed
from hp_recompute import swap
from hp_recompute.swapping.late_copies import late_copies
from hp_recompute.swapping.pinned import HostPool
from hp_recompute.swapping.storage import State, SwappedStorage

sys.path.insert(0, str(Path(__file__).parent))

from swap_models import make_blocks, real, step


@distributed(world_size=1)
def test_memory_of_the_host_is_used_again_and_given_back(world: World) -> None:
    blocks = make_blocks(world)
    for group_swap in (False, True):
        with late_copies() as manager:
            taken = []
            for _ in range(3):
                step(world, lambda block, x: swap(block, x, group_swap=group_swap), blocks, (1, 0))  # noqa: B023
                gc.collect()
                taken.append(manager.host_nbytes)
            assert taken[0] == taken[1] == taken[2] > 0
            manager.free_host_memory()
            assert manager.host_nbytes == 0


@distributed(world_size=1)
def test_a_storage_goes_round_in_one_way_and_tells_of_others(world: World) -> None:
    way = [
        State.TO_HOST,
        State.HOST,
        State.TO_DEVICE,
        State.DEVICE,
        State.HOST,
        State.TO_DEVICE,
        State.DEVICE,
    ]
    storage = SwappedStorage(world.platform, None, world.device, 0)
    assert storage.state is State.DEVICE
    for state in way:
        storage.move(state)
        assert storage.state is state
    allowed = {
        (State.DEVICE, State.TO_HOST),
        (State.DEVICE, State.HOST),
        (State.TO_HOST, State.HOST),
        (State.TO_HOST, State.DEVICE),
        (State.HOST, State.TO_DEVICE),
        (State.TO_DEVICE, State.DEVICE),
    }
    for start in State:
        for state in State:
            storage = SwappedStorage(world.platform, None, world.device, 0)
            storage.state = start
            if (start, state) in allowed:
                storage.move(state)
            else:
                message = f"goes from {start.value} to {state.value}, which is no way of its own"
                with pytest.warns(UserWarning, match=message):
                    storage.move(state)


@distributed(world_size=1)
def test_memory_that_a_copy_goes_to_is_held_when_nobody_wants_it_any_more(world: World) -> None:
    platform = world.platform
    with late_copies() as manager:
        for name in ("dropped", "wanted"):
            manager.ensure_group(name)
        saved = {
            name: manager.add_storage(name, platform.full((5,), value, real(world), world.device))
            for name, value in (("dropped", 1.0), ("wanted", 2.0))
        }
        for name in saved:
            manager.launch_offload(name)
            manager.wait_offload(name)
        manager.launch_load("dropped")
        del saved["dropped"]
        manager.drop_group("dropped")
        gc.collect()
        before = manager.copies_of(world.device).num_copies
        np.testing.assert_array_equal(platform.to_numpy(saved["wanted"].get()), np.full(5, 2.0))
        assert manager.copies_of(world.device).num_copies == before + 2


@distributed(world_size=1)
def test_the_pool_gives_the_smallest_piece_that_fits(world: World) -> None:
    made: list[int] = []

    def empty(nbytes: int) -> Any:
        made.append(nbytes)
        return bytearray(nbytes)

    pool = HostPool(empty, exact=False)
    buffers = [pool.take(nbytes) for nbytes in (100, 300, 120)]
    assert pool.nbytes == 520
    assert pool.free_nbytes == 0
    buffers.clear()
    assert pool.free_nbytes == 520
    assert len(pool.take(101).memory) == 120
    kept = pool.take(101)
    assert len(kept.memory) == 120, "the one before came back"
    assert len(pool.take(40).memory) == 40, "100 is more than twice as large"
    assert made == [100, 300, 120, 40]
    pool.clear()
    assert pool.nbytes == 120
    exact = HostPool(empty, exact=True)
    exact.take(100)
    assert len(exact.take(99).memory) == 99
