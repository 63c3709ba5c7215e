"""Whoever catches an exception that left a forward finds shards and their memory alone, and training goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import DTensor
from hp_fsdp import fully_shard, parts, register_forward_method
from hp_fsdp.states import ShardState
from hp_fsdp.unit import Unit
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from attack_pairs import Pair
from fsdp_models import Maker, sgd_step


class OnPurposeError(Exception):
    """Raised where a test wants a failure."""


class StopByHand(BaseException):
    """As KeyboardInterrupt: no Exception."""


class Fuse:
    """Blows where it is told to."""

    def __init__(self) -> None:
        self.place = ""
        self.error: type[BaseException] = OnPurposeError

    def __call__(self, place: str) -> None:
        if place == self.place:
            raise self.error(f"at {place}")

    @contextmanager
    def blows(self, place: str, error: type[BaseException] = OnPurposeError) -> Iterator[None]:
        """The block ends with the error, which is caught, and the fuse is whole again."""
        self.place, self.error = place, error
        with pytest.raises(error, match=f"^at {place}"):
            yield
        self.place = ""


PLACES = (
    "root, before units",
    "first unit",
    "outer unit, before the inner one",
    "inner unit",
    "inner unit, second call",
    "outer unit, after the inner one",
    "last unit",
    "root, after units",
)


def build(fuse: Callable[[str], None]) -> Callable[[Maker], Any]:
    """Three units, the second with one inside of it that runs twice, between two layers of the root."""

    def make(maker: Maker) -> Any:
        platform = maker.platform

        class Block(platform.Module):
            def __init__(self, place: str, width: int) -> None:
                super().__init__()
                self.place, self.layer = place, maker.block(4, width)

            def forward(self, x: Any) -> Any:
                x = platform.silu(self.layer(x))
                fuse(self.place)
                return self.layer(x)

        class Outer(platform.Module):
            def __init__(self) -> None:
                super().__init__()
                self.before, self.inner, self.after = (
                    maker.linear(4, 4),
                    maker.block(4, 3),
                    maker.linear(4, 4),
                )
                self.inside = Block("inner unit", 5)

            def forward(self, x: Any) -> Any:
                x = self.before(x)
                fuse("outer unit, before the inner one")
                x = self.inside(x)
                self.inside.place = "inner unit, second call"
                try:
                    x = self.inside(x)
                finally:
                    self.inside.place = "inner unit"
                x = self.after(self.inner(x))
                fuse("outer unit, after the inner one")
                return x

        def setup(module: Any) -> None:
            module.first, module.last = maker.linear(4, 4), maker.linear(3, 4)
            module.units = platform.ModuleList([Block("first unit", 6), Outer(), Block("last unit", 7)])

        def forward(module: Any, x: Any, rank: int) -> Any:
            x = module.first(x)
            fuse("root, before units")
            for unit in module.units:
                x = unit(x)
            x = module.last(x)
            fuse("root, after units")
            return x

        return maker.model(setup, forward)

    return make


class Training(Pair):
    """Of the model above."""

    def __init__(self, world: World, **options: Any) -> None:
        self.fuse = Fuse()

        def shard(model: Any, mesh: Any) -> None:
            for module in (model.units[0], model.units[1].inside, model.units[1], model.units[2], model):
                fully_shard(module, mesh, **options)

        super().__init__(world, build(self.fuse), shard)
        self.batch = 0
        self.own = dict(self.platform.named_parameters(self.sharded))

    def train(self) -> None:
        """A step of both; all gradients are those of one process."""
        self.backward(self.loss(self.batch))
        self.finish(self.reference_loss(self.batch))

    def finish(self, reference_loss: Any) -> None:
        self.backward(reference_loss)
        self.check()
        sgd_step(self.platform, self.reference)
        sgd_step(self.platform, self.sharded)
        self.batch = self.batch + 1

    def check_shards(self) -> None:
        """The parameters are the very ones that an optimizer knows, and nothing is held for whole ones."""
        found = dict(self.platform.named_parameters(self.sharded))
        assert list(found) == list(self.own)
        assert all(isinstance(found[name], DTensor) and found[name] is self.own[name] for name in found)
        assert list(self.platform.state_dict(self.sharded)) == list(self.own)
        for unit in self.units:
            assert is_freed(unit), unit.label


def is_freed(unit: Unit) -> bool:
    platform = unit.platform
    return unit.state is ShardState.SHARDED and not any(
        platform.storage_nbytes(param.full)
        for param in unit.params
        if param.full is not None and not param.is_alias
    )


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@distributed(world_size=(1, 2))
def test_a_failure_anywhere_in_forward_leaves_shards_and_training_goes_on(
    world: World, reshard_after_forward: bool
) -> None:
    """In the first step, and later, when the next unit's gather is under way; with gradients and without."""
    training = Training(world, reshard_after_forward=reshard_after_forward)
    for place in PLACES:
        with training.fuse.blows(place):
            training.loss()
        training.check_shards()
        with world.platform.no_grad(), training.fuse.blows(place, StopByHand):
            training.loss()
        training.check_shards()
        sgd_step(world.platform, training.sharded)  # gradients are none: nothing is written
        training.train()


@distributed(world_size=4, backends=("torch", "cuda", "npu"))
def test_small_worlds_keep_nothing_after_a_failure(world: World) -> None:
    training = Training(world, reshard_after_forward=2)
    for place in ("inner unit", "last unit", "root, after units"):
        with training.fuse.blows(place):
            training.loss()
        training.check_shards()
        assert not any(unit.small_world.is_full for unit in training.units if unit.small_world is not None)
        training.train()


@distributed(world_size=2)
def test_parts_of_the_root_are_shards_after_a_failure(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MIN_NBYTES", 4 * 4 * 4)
        training = Training(world)
        training.train()
        if world.platform.supports("stand_ins", world.device):
            assert training.sharded._hp_fsdp_unit.parts
        for place in PLACES:
            with training.fuse.blows(place):
                training.loss()
            training.check_shards()
            training.train()


@distributed(world_size=2)
def test_hooks_of_the_user_may_fail_before_and_after_ours(world: World) -> None:
    platform, training = world.platform, Training(world)
    training.train()

    def fail(*_: Any) -> None:
        raise OnPurposeError("at a hook")

    for name in ("", "units.0", "units.1", "units.1.inside", "units.2", "last"):
        module = platform.get_submodule(training.sharded, name)
        for register in (
            lambda module: platform.register_forward_pre_hook(module, fail),
            lambda module: platform.register_forward_pre_hook(module, fail, prepend=True),
            lambda module: platform.register_forward_hook(module, fail),
            lambda module: platform.register_forward_hook(module, fail, prepend=True),
        ):
            handle = register(module)
            with pytest.raises(OnPurposeError):
                training.loss()
            handle.remove()
            training.check_shards()
        training.train()


@distributed(world_size=2)
def test_what_waits_for_its_backward_outlives_a_failed_forward(world: World) -> None:
    """Also where the call has failed before it began: then nothing is gathered again."""
    platform, training = world.platform, Training(world)
    training.train()
    training.backward(training.reference_loss(1))
    with count_collectives() as usual:
        training.backward(training.loss(1))
    training.check()
    training.finish(training.reference_loss(1) * 0.0)

    loss = training.loss(2)
    for place in PLACES:
        with training.fuse.blows(place):
            training.loss(3)
    training.backward(loss)
    training.finish(training.reference_loss(2))

    def fail(*_: Any) -> None:
        raise OnPurposeError("too early")

    with count_collectives() as counted:
        loss = training.loss(2)
        handle = platform.register_forward_pre_hook(training.sharded, fail, prepend=True)
        with pytest.raises(OnPurposeError):
            training.loss(3)
        handle.remove()
        training.backward(loss)
    training.finish(training.reference_loss(2))
    assert counted.counts == usual.counts


@distributed(world_size=2)
def test_failures_at_different_places_on_the_ranks_concern_each_alone(world: World) -> None:
    """Between collectives: all ranks have launched the same, also of units that they have looked ahead to."""
    training, is_first = Training(world), world.rank == 0

    def fail(*_: Any) -> None:
        raise OnPurposeError("at first unit")

    for _ in range(2):
        training.train()
        handle = None
        if not is_first:
            outer = training.sharded.units[1]
            handle = world.platform.register_forward_pre_hook(outer, fail, prepend=True)
        with training.fuse.blows("first unit" if is_first else ""):
            training.loss()
        if handle is not None:
            handle.remove()
        training.check_shards()
        training.train()
        with training.fuse.blows("root, after units" if is_first else "last unit"):
            training.loss()
        training.check_shards()


@distributed(world_size=2)
def test_a_failure_on_one_rank_concerns_that_rank_alone(world: World) -> None:
    training = Training(world)
    for _ in range(2):
        if world.rank == 0:
            with training.fuse.blows("root, after units"):  # the others' forward is done by then
                training.loss()
            training.check_shards()
        else:
            training.loss()
        training.train()


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
