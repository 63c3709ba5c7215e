"""What changes between steps: which parameters train; copies made before sharding; modules that return nothing."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import (
    PROGRAMS,
    Maker,
    local,
    loss_of,
    make_mesh,
    numpy_of,
    reference_gradients,
    sgd_step,
    tolerance,
    whole,
)


class Pair:
    """A program unsharded and sharded, step by step."""

    def __init__(self, world: World, name: str, replicas: int = 1, **options: Any) -> None:
        self.world, self.platform, self.program = world, world.platform, PROGRAMS[name]
        self.reference, self.model = self.program.build(Maker(world)), self.program.build(Maker(world))
        self.shapes = {n: tuple(p.shape) for n, p in self.platform.named_parameters(self.reference)}
        self.mesh = make_mesh(world, replicas)
        self.program.shard(self.model, self.mesh, **options)

    def train_only(self, *prefixes: str) -> None:
        for model in (self.reference, self.model):
            for name, parameter in self.platform.named_parameters(model):
                self.platform.set_requires_grad_(parameter, name.startswith(prefixes) if prefixes else False)

    def backward(self, batch: int) -> None:
        maker = Maker(self.world)
        reference_gradients(self.program, maker, self.reference, self.world.size, batch)
        output = self.model(self.program.inputs(maker, self.world.rank, batch), rank=self.world.rank)
        self.platform.backward([loss_of(self.platform, output)])

    def check(self, what: str) -> None:
        get_grad = self.platform.get_grad
        assert_parity(
            whole(self.world, self.model, self.shapes, self.mesh, get_grad),
            numpy_of(self.platform, self.reference, get_grad),
            **tolerance(self.world),
            name=what,
        )

    def step(self) -> None:
        sgd_step(self.platform, self.reference)
        sgd_step(self.platform, self.model)


PHASES: tuple[tuple[str, ...], ...] = (
    ("",),
    ("blocks.0",),
    ("head", "blocks.1.inner"),
    ("",),
    ("blocks.1.outer.bias",),
    ("blocks",),
    ("head.bias",),
    ("",),
)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "apart": {"comm_fusion": False},
    "kept": {"reshard_after_forward": False},
    "copied": {"comm_fusion_zero_copy": False},
    "inputs as they are": {"mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)},
}


@pytest.mark.parametrize("kind", list(OPTIONS))
@distributed(world_size=2)
def test_parameters_may_be_frozen_and_trained_in_turns(world: World, kind: str) -> None:
    pair = Pair(world, "mlp", **OPTIONS[kind])
    for number, prefixes in enumerate(PHASES):
        pair.train_only(*prefixes)
        pair.backward(number)
        pair.check(f"{prefixes} train")
        pair.step()


@distributed(world_size=4, backends="torch")
def test_so_they_may_on_replicas(world: World) -> None:
    for replicas in (2, 4):
        pair = Pair(world, "mlp", replicas)
        for number, prefixes in enumerate(PHASES):
            pair.train_only(*prefixes)
            pair.backward(number)
            pair.check(f"{prefixes} train")
            pair.step()


@distributed(world_size=2)
def test_parameters_that_were_frozen_when_they_were_sharded_train_later(world: World) -> None:
    pair = Pair(world, "frozen")
    for number, prefixes in enumerate((("head",), ("still", "head"), ("",), ("block",))):
        pair.train_only(*prefixes)
        with count_collectives() as counted:
            pair.backward(number)
        # Gathered for backward are units that gradients reach, reduced are those in which something trains.
        counted.assert_counts(all_gather=(3, 4, 5, 5)[number], reduce_scatter=(1, 2, 3, 1)[number])
        pair.check(f"{prefixes} train")
        pair.step()


@pytest.mark.parametrize("name", ["mlp", "branches"])
@distributed(world_size=2)
def test_what_was_accumulated_before_freezing_is_not_lost_and_not_counted_twice(
    world: World, name: str
) -> None:
    """Two backwards without synchronisation; a part is frozen; then one that synchronises; and it trains again."""
    pair = Pair(world, name)
    names = list(pair.shapes)
    for round_number in range(2):
        pair.train_only("")
        pair.model.set_requires_gradient_sync(False)
        pair.backward(3 * round_number)
        pair.backward(3 * round_number + 1)
        pair.train_only(*names[: len(names) // 2 - 1], names[-1])
        pair.model.set_requires_gradient_sync(True)
        pair.backward(3 * round_number + 2)
        pair.check(f"round {round_number}")
        pair.step()


@distributed(world_size=2)
def test_copies_made_before_sharding_are_models_of_their_own(world: World) -> None:
    platform = world.platform
    model = PROGRAMS["tied"].build(Maker(world))
    copies = [copy.deepcopy(model) for _ in range(2)]
    mesh = make_mesh(world)
    sharded = PROGRAMS["tied"].shard(copies[0], mesh)
    assert sharded.head.weight is sharded.embed.weight
    shapes = {n: tuple(p.shape) for n, p in platform.named_parameters(model)}
    assert {n: tuple(p.shape) for n, p in platform.named_parameters(copies[1])} == shapes
    late = copy.deepcopy(copies[1])  # a copy of a copy, after another one was sharded
    average = PROGRAMS["tied"].shard(late, mesh)
    assert average.head.weight is average.embed.weight
    maker = Maker(world)
    for step in range(2):
        reference_gradients(PROGRAMS["tied"], maker, model, world.size, step)
        platform.backward([loss_of(platform, sharded(PROGRAMS["tied"].inputs(maker, world.rank, step)))])
        sgd_step(platform, model)
        sgd_step(platform, sharded)
        # An average of weights, kept in pieces beside the model.
        for (_, mean), (_, now) in zip(
            platform.named_parameters(average), platform.named_parameters(sharded), strict=True
        ):
            platform.mul_(local(mean), 0.5)
            platform.add_(local(mean), platform.detach(local(now)), alpha=0.5)
    assert_parity(
        whole(world, sharded, shapes, mesh, platform.detach),
        numpy_of(platform, model, platform.detach),
        **tolerance(world),
    )
    with platform.no_grad():
        average(PROGRAMS["tied"].inputs(maker, world.rank, 0))


def by_the_way(world: World) -> Any:
    """A unit that returns None, and leaves its result where the next one finds it."""
    maker = Maker(world)
    platform = maker.platform
    store: dict[str, Any] = {}

    class Silent(platform.Module):
        def __init__(self, is_used: bool) -> None:
            super().__init__()
            self.linear = maker.linear(4, 4)
            self.is_used = is_used

        def forward(self, x: Any) -> None:
            y = self.linear(x)
            if self.is_used:
                store["x"] = y

    def setup(module: Any) -> None:
        module.before = maker.linear(4, 4)
        module.used = Silent(True)
        module.unused = Silent(False)
        module.after = maker.linear(2, 4)

    def forward(module: Any, x: Any, rank: int) -> Any:
        x = module.before(x)
        assert module.used(x) is None
        assert module.unused(x) is None
        return module.after(store.pop("x"))

    return maker.model(setup, forward)


@distributed(world_size=2)
def test_units_that_return_nothing_train_and_are_freed(world: World) -> None:
    platform, mesh = world.platform, make_mesh(world)
    reference, model = by_the_way(world), by_the_way(world)
    shapes = {n: tuple(p.shape) for n, p in platform.named_parameters(reference)}
    for each in (model.used, model.unused):
        fully_shard(each, mesh)
    fully_shard(model, mesh)

    def held() -> Iterator[bool]:
        for module in (model.used, model.unused, model):
            yield any(platform.storage_nbytes(param.full) > 0 for param in module._hp_fsdp_unit.params)

    for step in range(3):
        maker = Maker(world)
        reference_gradients(PROGRAMS["mlp"], maker, reference, world.size, step)
        loss = loss_of(platform, model(PROGRAMS["mlp"].inputs(maker, world.rank, step)))
        platform.backward([loss])
        assert not any(held()), "nobody tells of their backward, but its end is known"
        assert_parity(
            whole(world, model, shapes, mesh, platform.get_grad),
            numpy_of(platform, reference, platform.get_grad),
            **tolerance(world),
        )
        assert platform.get_grad(local(model.unused.linear.weight)) is None
        sgd_step(platform, reference)
        sgd_step(platform, model)
        with platform.no_grad():
            model(PROGRAMS["mlp"].inputs(maker, world.rank, step))
        assert not any(held())
