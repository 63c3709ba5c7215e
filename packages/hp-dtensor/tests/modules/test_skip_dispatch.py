"""SkipDTensorDispatch: operations inside run on local tensors, in this context only."""

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor
from hp_dtensor.skip_dispatch import SkipDTensorDispatch
from hp_platform import _process
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from layer_programs import make_mesh, tensor

R, S0 = Replicate(), Shard(0)


def _cut(world: World) -> Any:
    return distribute_tensor(tensor(world, 5, 2), make_mesh(world), [S0])


def _is_dtensor(x: Any) -> bool:
    return isinstance(x, DTensor)


@distributed(world_size=2)
def test_operations_run_on_pieces_and_give_plain_results(world: World) -> None:
    x = _cut(world)
    with SkipDTensorDispatch(), count_collectives() as counted:
        doubled, total, row = x + x, x.sum(), x[0]
        assert tuple(x.shape) == (5, 2)
    counted.assert_counts()
    assert not any(map(_is_dtensor, (doubled, total, row)))
    assert_parity(doubled, x.to_local() + x.to_local(), exact=True)
    assert_parity(total, x.to_local().sum(), exact=True)
    assert _is_dtensor(x + x)
    assert _process.open_modes.count == 0


@distributed(world_size=2)
def test_some_operations_may_still_be_dispatched(world: World) -> None:
    x, p = _cut(world), world.platform
    with SkipDTensorDispatch(no_skip={"add", p.matmul}):
        assert [_is_dtensor(y) for y in (x + 1, x.add(1), x * 2, x @ x.t())] == [True, True, False, True]
        with SkipDTensorDispatch():
            assert not _is_dtensor(x + 1)
        assert _is_dtensor(x + 1)


@distributed(world_size=2)
def test_a_block_ends_with_an_error_and_may_be_entered_again(world: World) -> None:
    x, skip = _cut(world), SkipDTensorDispatch()
    for _ in range(2):
        try:
            with skip, skip:
                assert not _is_dtensor(x + 1)
                raise KeyError("x")
        except KeyError:
            assert _is_dtensor(x + 1)
    assert _process.open_modes.count == 0


@distributed(world_size=2)
def test_other_threads_and_tasks_are_not_concerned(world: World) -> None:
    x, found = _cut(world), []

    async def inside(entered: asyncio.Event, left: asyncio.Event) -> bool:
        with SkipDTensorDispatch():
            entered.set()
            await left.wait()
            return _is_dtensor(x + 1)

    async def outside(entered: asyncio.Event, left: asyncio.Event) -> bool:
        await entered.wait()
        result = _is_dtensor(x + 1)
        left.set()
        return result

    async def both() -> Any:
        events = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(inside(*events), outside(*events))

    assert asyncio.run(both()) == [False, True]
    with SkipDTensorDispatch():
        thread = threading.Thread(target=lambda: found.append(_is_dtensor(x + 1)))
        thread.start()
        thread.join()
    assert found == [True]
