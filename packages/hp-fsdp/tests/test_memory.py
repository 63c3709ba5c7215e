"""How much memory a sharded model takes: what the layout says, and not more."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hp_fsdp import (
    CPUOffloadPolicy,
    MemoryPlan,
    MixedPrecisionPolicy,
    fully_shard,
    memory_plan,
)
from hp_fsdp.arrangement import Arrangement
from hp_fsdp.unit import units_in
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import Maker, loss_of, make_mesh, sgd_step

NUM_BLOCKS, WIDTH = 6, 160
"""Units below a megabyte: allocators of accelerators hand out larger blocks than they were asked for above."""
LOW = MixedPrecisionPolicy(param_dtype="bfloat16", reduce_dtype="float32")
KINDS: dict[str, dict[str, Any]] = {
    "low precision": {"mp_policy": LOW},
    "as it is": {},
    "offloaded": {"mp_policy": LOW, "offload_policy": CPUOffloadPolicy()},
}


def build(world: World, width: int = WIDTH) -> Any:
    """Equal blocks, and a small head. Few samples, so that activations do not count."""
    maker = Maker(world, "float32")

    def setup(module: Any) -> None:
        module.blocks = world.platform.ModuleList([maker.block(width, 4 * width) for _ in range(NUM_BLOCKS)])
        module.head = maker.linear(4, width)

    def forward(module: Any, x: Any, rank: int) -> Any:
        for block in module.blocks:
            x = block(x)
        return module.head(x)

    return maker.model(setup, forward)


def sharded(world: World, width: int = WIDTH, **kwargs: Any) -> Any:
    model, mesh = build(world, width), make_mesh(world)
    for block in model.blocks:
        fully_shard(block, mesh, **kwargs)
    return fully_shard(model, mesh, **kwargs)


def step(world: World, model: Any, width: int = WIDTH) -> None:
    platform = world.platform
    x = platform.full((2, width), 0.5, "float32", world.device)
    platform.backward([loss_of(platform, platform.cast(model(x), "float32"))])
    sgd_step(platform, model)


def theory(plan: MemoryPlan, *, moves_gradients: bool) -> int:
    """The highest sum in the backward of any block, from the last to the first, and in forward.

    When block k begins, the one before it is gathered. Before the reduction of block k is launched two others are under
    way; after that one, and its own, for which gradients may have been moved.
    """
    root, *blocks = plan.units
    states = plan.shards + plan.peers + root.whole + sum(unit.kept_whole for unit in plan.units)
    sums = [states + sum(block.whole + block.staging for block in blocks[:1]) + blocks[1].whole]
    for k, block in enumerate(blocks):
        whole = block.whole + (blocks[k - 1].whole if k else 0)
        # Offloaded gradients are on the host, and their lines count among the buffers of reductions.
        done = sum(other.gradients for other in blocks[k + 1 :] if not other.is_offloaded)
        buffers = [other.reduction for other in blocks[k + 1 : k + 3]]
        staging = blocks[k - 1].staging if k else 0
        sums.append(states + whole + done + sum(buffers) + staging)
        sums.append(states + whole + done + sum(buffers) + block.whole_gradients)
        own = block.reduction + (0 if block.is_offloaded else block.gradients)
        moved = block.whole_gradients if moves_gradients else 0
        sums.append(states + whole + done + sum(buffers[:1]) + own + moved)
    return max(sums)


def warm(world: World, width: int) -> None:
    """Libraries keep workspaces from their first use on: let it be before anything is measured."""
    platform = world.platform
    for dtype in ("float32", "bfloat16"):
        maker = Maker(world, dtype)
        block = maker.block(width, 4 * width)
        platform.backward([loss_of(platform, block(platform.full((2, width), 0.5, dtype, world.device)))])


def check_peak(world: World, kind: str, width: int) -> None:
    """The measured peak of a step is the layout's, and that of every later step."""
    device = world.platform.device(world.device)
    warm(world, width)
    gc.collect()
    device.synchronize()
    before = device.memory_allocated()
    model = sharded(world, width, **KINDS[kind])
    plan = memory_plan(model)
    gc.collect()
    assert device.memory_allocated() - before == pytest.approx(plan.shards, rel=0.05, abs=40_000)
    peaks = []
    for number in range(5):
        if number:  # from the second step on units are gathered ahead
            gc.collect()
            device.synchronize()
            device.reset_peak_memory()
        step(world, model, width)
        peaks.append(device.max_memory_allocated() - before)
    # Gradients of the dtype in which they travel are sent from where they are, if the backend takes several tensors.
    takes_lists = kind == "as it is" or world.platform.can_exchange_lists(world.device_type)
    expected = theory(plan, moves_gradients=world.size == 1 or not takes_lists)
    assert peaks[-1] == pytest.approx(expected, rel=0.05), f"{peaks}, by the layout {expected}\n{plan}"
    assert peaks[-1] <= plan.peak * 1.02
    assert max(peaks[1:]) - min(peaks[1:]) < 20_000, peaks


@pytest.mark.parametrize("kind", list(KINDS))
@distributed(world_size=(1, 2), backends=("cuda", "npu"))
def test_the_peak_of_a_step_is_what_the_layout_says(world: World, kind: str) -> None:
    check_peak(world, kind, WIDTH)


@pytest.mark.parametrize("kind", list(KINDS))
@distributed(world_size=(1, 2), backends="cuda")
def test_so_it_is_with_units_of_a_hundred_megabytes(world: World, kind: str) -> None:
    check_peak(world, kind, 2048)


@distributed(world_size=(1, 2), backends=("cuda", "npu"))
def test_nothing_grows_over_steps_nor_over_evaluations(world: World) -> None:
    platform, device = world.platform, world.platform.device(world.device)
    model = sharded(world, mp_policy=LOW)
    held: list[int] = []
    for _ in range(6):
        step(world, model)
        gc.collect()
        held.append(device.memory_allocated())
    assert len(set(held[1:])) == 1, held
    peaks = []
    x = platform.full((2, WIDTH), 0.5, "float32", world.device)
    for _ in range(6):
        device.synchronize()
        device.reset_peak_memory()
        with platform.no_grad():
            model(x)
        peaks.append(device.max_memory_allocated() - held[-1])
        assert device.memory_allocated() <= held[-1] + 20_000
    assert max(peaks[1:]) - min(peaks[1:]) < 20_000, peaks
    root, *blocks = memory_plan(model).units
    assert peaks[-1] == pytest.approx(root.whole + blocks[0].whole * 2 + blocks[0].staging, rel=0.05)


@distributed(world_size=(1, 2))
def test_a_model_that_nobody_holds_any_more_is_gone_with_its_memory(world: World) -> None:
    model = sharded(world, 4)
    step(world, model, 4)
    alive = weakref.ref(model)
    del model
    for _ in range(100):  # a thread that has walked the graph may hold it a moment longer
        gc.collect()
        if alive() is None:
            return
        time.sleep(0.05)
    raise AssertionError("the model is still there")


class Gathered:
    """How many units besides the root have memory for whole parameters, at most."""

    def __init__(self, world: World, model: Any) -> None:
        self.platform = world.platform
        _, *self.units = units_in(world.platform, model)
        self.most = 0

    def now(self) -> int:
        return sum(
            any(self.platform.storage_nbytes(param.full) > 0 for param in unit.params) for unit in self.units
        )

    def look(self) -> None:
        self.most = max(self.most, self.now())


@contextmanager
def watching(gathered: Gathered) -> Iterator[None]:
    """Look whenever a unit gets memory."""
    allocate = Arrangement.allocate

    def watched(arrangement: Arrangement) -> None:
        allocate(arrangement)
        gathered.look()

    Arrangement.allocate = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        Arrangement.allocate = allocate  # type: ignore[method-assign]


@distributed(world_size=2)
def test_two_units_besides_the_root_are_whole_at_most(world: World) -> None:
    platform = world.platform
    model = sharded(world, 4)
    gathered = Gathered(world, model)
    x = platform.full((2, 4), 0.5, "float32", world.device)
    with watching(gathered):
        for number in range(4):
            model.set_requires_gradient_sync(number % 2 == 1)
            loss = loss_of(platform, model(x))
            assert gathered.most <= 2, "forward"
            assert gathered.now() == 0, "between forward and backward"
            platform.backward([loss])
            assert gathered.most == (1 if number == 0 else 2) or gathered.most == 2, "backward"
            assert gathered.now() == 0
        with platform.no_grad():
            for _ in range(2):
                model(x)
                assert gathered.now() == 0, "evaluation"
        loss_of(platform, model(x))  # its loss is dropped
        platform.backward([loss_of(platform, model(x))])
    assert gathered.most == 2
    assert gathered.now() == 0


@distributed(world_size=2)
def test_lists_to_prefetch_gather_as_many_as_they_say_and_the_plan_knows(world: World) -> None:
    platform = world.platform
    model = sharded(world, 4)
    assert memory_plan(model).num_ahead == 1
    blocks = list(model.blocks)
    for at, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[at + 1 : at + 4])
    gathered = Gathered(world, model)
    with watching(gathered), platform.no_grad():
        for _ in range(2):
            model(platform.full((2, 4), 0.5, "float32", world.device))
    assert gathered.most == 4
    assert memory_plan(model).num_ahead == 3


@distributed(world_size=(1, 2))
def test_a_plan_counts_shards_whole_parameters_and_buffers_of_every_unit(world: World) -> None:
    platform, n = world.platform, world.size
    model = sharded(world, 8, mp_policy=MixedPrecisionPolicy(reduce_dtype="float32"))
    plan = memory_plan(model)
    assert [unit.name for unit in plan.units] == ["", *(f"blocks.{k}" for k in range(NUM_BLOCKS))]
    numel = 2 * 8 * 32 + 8 + 32  # divides by the ranks
    _, *blocks = plan.units
    for block in blocks:
        assert block.shards == numel * 4 // n
        # The tail of a line has a number for each of four parameters.
        assert block.gradients == (numel // n + 4) * 4
        assert block.whole_gradients == numel * 4
        assert block.reduction == (0 if n == 1 else (numel + 4 * n) * 4)
        assert not block.stays_whole
        if n == 1:
            assert block.whole == 0, "another face of the shard"
        else:
            assert numel * 4 <= block.whole <= (numel + 4 * 64) * 4
    assert plan.units[0].stays_whole
    assert plan.gathered == plan.units[0].whole + 2 * blocks[0].whole
    assert plan.reductions == 2 * blocks[0].reduction
    assert plan.host == 0
    parts = (plan.shards, plan.gradients, plan.gathered, plan.reductions)
    assert plan.peak >= sum(parts) + blocks[0].whole_gradients
    assert "blocks.3" in str(plan)
    for _, parameter in platform.named_parameters(model.blocks[0]):
        platform.set_requires_grad_(parameter, False)
    still = memory_plan(model).units[1]
    assert (still.gradients, still.whole_gradients, still.reduction) == (0, 0, 0)
    model = sharded(world, 8, reshard_after_forward=False)
    assert memory_plan(model).gathered == sum(unit.whole for unit in memory_plan(model).units)


@distributed(world_size=4, min_world_size=4, backends=("torch", "cuda"))
def test_what_a_small_world_keeps_between_forward_and_backward_counts(world: World) -> None:
    model = sharded(world, 8, reshard_after_forward=2)
    plan = memory_plan(model)
    root, *blocks = plan.units
    pieces = sum(-(-block.whole // 2) for block in blocks)
    # The root stays whole itself.
    assert plan.gathered == root.whole + 2 * blocks[0].whole + pieces
    loss_of(world.platform, model(world.platform.full((2, 8), 0.5, "float32", world.device)))
    found = 0
    for unit in units_in(world.platform, model):
        assert unit.small_world is not None
        found = found + sum(world.platform.storage_nbytes(x) for x in unit.small_world._pieces)
    assert found == pieces


@distributed(world_size=2)
def test_offloaded_shards_count_on_the_host(world: World) -> None:
    plan = memory_plan(sharded(world, 8, offload_policy=CPUOffloadPolicy()))
    if world.device_type == "cpu":
        assert plan.host == 0
        return
    assert plan.shards == plan.gradients == 0
    assert plan.host == sum(unit.shards + unit.gradients for unit in plan.units) > 0
    assert all(unit.staging >= unit.shards for unit in plan.units)


@distributed(world_size=1)
def test_a_model_without_units_has_no_plan(world: World) -> None:
    with pytest.raises(
        ValueError, match="memory_plan takes a model with modules that fully_shard was called on, got"
    ):
        memory_plan(build(world, 4))
