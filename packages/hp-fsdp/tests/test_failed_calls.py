"""A forward that fails in a unit that is called again, in units of several modules, in registered methods."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hp_fsdp import fully_shard, register_forward_method
from hp_fsdp.states import ShardState
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from attack_pairs import Pair
from failing_forwards import Fuse, OnPurposeError, Training, is_freed
from fsdp_models import Maker, sgd_step


def calling_again(after: Callable[[Any], None]) -> Callable[[Maker], Any]:
    """The root catches what its unit raises, and calls it again with other inputs."""

    def make(maker: Maker) -> Any:
        platform = maker.platform

        class Block(platform.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.calls = maker.block(4, 5), 0

            def forward(self, x: Any) -> Any:
                x = self.layer(x)
                self.calls = self.calls + 1
                if self.calls % 3 == 2:
                    raise OnPurposeError("the second of three calls")
                return x

        def setup(module: Any) -> None:
            module.before, module.block, module.after = maker.linear(4, 4), Block(), maker.block(4, 3)

        def forward(module: Any, x: Any, rank: int) -> Any:
            x = module.block(module.before(x))
            with pytest.raises(OnPurposeError):
                module.block(x)
            after(module)
            return module.after(module.block(x * 2))

        return maker.model(setup, forward)

    return make


@distributed(world_size=(1, 2))
def test_an_outer_forward_may_catch_the_exception_and_call_the_unit_again(world: World) -> None:
    """The failed call is none that backward waits for: the unit is reduced when its other calls have been left."""
    seen, reduced = [], []

    def after(module: Any) -> None:
        unit = getattr(module.block, "_hp_fsdp_unit", None)
        if unit is not None:
            root = module._hp_fsdp_unit
            seen.append((is_freed(unit), root.state))

    def shard(model: Any, mesh: Any) -> None:
        for module in (model.block, model.after, model):
            fully_shard(module, mesh)

    pair = Pair(world, calling_again(after), shard)

    def note(*_: Any) -> None:
        unit = pair.sharded.block._hp_fsdp_unit
        reduced.append((unit.uses.num_calls, is_freed(unit)))

    for batch in range(3):
        loss = pair.loss(batch)
        handle = world.platform.register_post_accumulate_grad_hook(
            pair.sharded._hp_fsdp_unit.params[0].full, note
        )
        pair.backward(loss)
        handle.remove()
        pair.backward(pair.reference_loss(batch))
        pair.check()
        sgd_step(world.platform, pair.reference)
        sgd_step(world.platform, pair.sharded)
    assert seen == [(True, ShardState.SHOWN)] * 3
    assert reduced == [(2, True)] * 3, "the unit was settled before the root's own layers ran backward"


@distributed(world_size=2)
def test_units_of_several_modules_end_their_round_when_one_fails(world: World) -> None:
    fuse = Fuse()

    def make(maker: Maker) -> Any:
        def setup(module: Any) -> None:
            module.parts = maker.platform.ModuleList([maker.block(4, 3), maker.block(4, 5)])
            module.last = maker.linear(4, 4)

        def forward(module: Any, x: Any, rank: int) -> Any:
            for at, part in enumerate(module.parts):
                fuse(f"before {at}")
                x = part(x)
            return module.last(x)

        return maker.model(setup, forward)

    def shard(model: Any, mesh: Any) -> None:
        fully_shard(list(model.parts), mesh)
        fully_shard(model, mesh)

    pair = Pair(world, make, shard)
    platform, several = world.platform, pair.sharded.parts[0]._hp_fsdp_unit

    def fail(*_: Any) -> None:
        raise OnPurposeError("at a hook")

    def step() -> None:
        pair.backward(pair.loss())
        pair.backward(pair.reference_loss())
        pair.check()
        sgd_step(platform, pair.reference)
        sgd_step(platform, pair.sharded)

    with fuse.blows("before 1"):
        pair.loss()
    assert all(is_freed(unit) for unit in pair.units)
    step()
    for register in (platform.register_forward_pre_hook, platform.register_forward_hook):
        handle = register(pair.sharded.parts[1], fail)
        with pytest.raises(OnPurposeError):
            pair.loss()
        assert all(is_freed(unit) for unit in pair.units)
        # Called without the root around them: the round of both has no outer call that could end it.
        x = pair.sharded.parts[0](pair.inputs(world.rank))
        with pytest.raises(OnPurposeError):
            pair.sharded.parts[1](x)
        assert is_freed(several)
        assert not several.entered
        handle.remove()
        step()


@distributed(world_size=2)
def test_registered_methods_leave_shards_when_they_fail(world: World) -> None:
    training = Training(world)
    model = training.sharded

    def encode(x: Any, calls_model: bool) -> Any:
        out = model(x) if calls_model else model.last(x)
        training.fuse("method")
        return out

    object.__setattr__(model, "encode", encode)
    register_forward_method(model, "encode")
    for place, calls_model in (("method", False), ("method", True), ("inner unit", True)):
        with training.fuse.blows(place):
            model.encode(training.inputs(world.rank), calls_model)
        training.check_shards()
        training.train()
    assert_parity(
        world.platform.detach(model.encode(training.inputs(0), False)),
        world.platform.detach(training.reference.last(training.inputs(0))),
        rtol=1e-6,
        atol=1e-6,
    )


@distributed(world_size=2)
def test_a_failure_before_anything_has_run_is_only_itself(world: World) -> None:
    training = Training(world)
    with pytest.raises(TypeError):
        training.sharded()
    training.check_shards()
    training.train()
    with pytest.raises(TypeError):
        training.sharded(1, 2, 3, 4)
    training.check_shards()
    training.train()
