"""Several modules as one unit: gathered with the first that runs, in any order, with some left out, alone or inside of a root."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_fsdp import HSDPModule, fully_shard
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import PROGRAMS, Maker, local, loss_of, make_mesh, numpy_of, sgd_step, tolerance, whole


def build(world: World) -> Any:
    """Three modules and a head, run in the order that the caller says."""
    maker = Maker(world)

    def setup(module: Any) -> None:
        module.a = maker.block(4, 5)
        module.b = maker.linear(4, 4)
        module.c = maker.block(4, 3)
        module.head = maker.linear(2, 4)

    def forward(module: Any, x: Any, way: Any) -> Any:
        return module.head(run(module, x, way))

    return maker.model(setup, forward)


def run(module: Any, x: Any, way: str) -> Any:
    for name in way:
        x = getattr(module, name)(x)
    return x


class Case:
    """The unit of three, inside of a root or (``is_alone``) without anything around it."""

    def __init__(self, world: World, is_alone: bool, **options: Any) -> None:
        self.world, self.platform, self.is_alone = world, world.platform, is_alone
        self.mesh = make_mesh(world)
        self.reference, self.model = build(world), build(world)
        self.shapes = {n: tuple(p.shape) for n, p in self.platform.named_parameters(self.reference)}
        modules = [self.model.a, self.model.b, self.model.c]
        assert fully_shard(modules, self.mesh, **options) is modules
        assert all(isinstance(each, HSDPModule) for each in modules)
        if is_alone:
            fully_shard(self.model.head, self.mesh)
        else:
            fully_shard(self.model, self.mesh)

    def loss(self, model: Any, way: str, rank: int, step: int) -> Any:
        x = PROGRAMS["mlp"].inputs(Maker(self.world), rank, step)
        output = model.head(run(model, x, way)) if self.is_alone else model(x, way)
        return loss_of(self.platform, output)

    def step(self, way: str, step: int) -> None:
        platform, world = self.platform, self.world
        platform.backward([self.loss(self.model, way, world.rank, step)])
        total = self.loss(self.reference, way, 0, step)
        for rank in range(1, world.size):
            total = total + self.loss(self.reference, way, rank, step)
        platform.backward([total / world.size])
        assert_parity(
            whole(world, self.model, self.shapes, self.mesh, platform.get_grad),
            numpy_of(platform, self.reference, platform.get_grad),
            **tolerance(world),
            name=f"gradients of step {step}, {way}",
        )
        sgd_step(platform, self.model)
        sgd_step(platform, self.reference)

    def evaluate(self, way: str, step: int) -> None:
        with self.platform.no_grad():
            found = self.loss(self.model, way, self.world.rank, step)
            expected = self.loss(self.reference, way, self.world.rank, step)
        assert_parity(found, expected, **tolerance(self.world), name=f"{way} after step {step}")


WAYS = ("abc", "cba", "ab", "c", "b", "abcabc", "aab", "bca")


@pytest.mark.parametrize("is_alone", [False, True])
@distributed(world_size=(1, 2, 3))
def test_any_order_and_any_part_of_them_trains_as_in_one_process(world: World, is_alone: bool) -> None:
    for options in ({}, {"reshard_after_forward": False}):
        case = Case(world, is_alone, **options)
        for step, way in enumerate(WAYS):
            case.step(way, step)
    assert local(case.model.b.weight).shape[0] == -(-4 // world.size) or world.rank == 2


@pytest.mark.parametrize("is_alone", [False, True])
@distributed(world_size=2)
def test_what_was_gathered_for_a_part_of_them_is_not_used_when_it_is_old(
    world: World, is_alone: bool
) -> None:
    """Evaluation of some of them leaves a round open; then values change; then others run."""
    platform, case = world.platform, Case(world, is_alone)
    shards = dict(platform.named_parameters(case.model))
    for step, (first, second) in enumerate((("a", "bc"), ("ab", "c"), ("c", "ab"), ("b", "b"))):
        case.evaluate(first, step)
        assert all(x is shards[name] for name, x in platform.named_parameters(case.model))
        for model in (case.model, case.reference):
            for _, parameter in platform.named_parameters(model):
                platform.mul_(local(parameter), 0.5)
        case.evaluate(second, step)
        case.step("abc", step)


@pytest.mark.parametrize("is_alone", [False, True])
@distributed(world_size=2)
def test_training_goes_on_after_one_of_them_has_failed(world: World, is_alone: bool) -> None:
    platform, case = world.platform, Case(world, is_alone)

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    for step, (name, way) in enumerate((("a", "abc"), ("b", "abc"), ("c", "cab"), ("b", "b"))):
        handle = platform.register_forward_pre_hook(getattr(case.model, name), fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            case.loss(case.model, way, world.rank, step)
        handle.remove()
        case.step(way[::-1], 2 * step)
        handle = platform.register_forward_hook(getattr(case.model, name), fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            case.loss(case.model, way, world.rank, step)
        handle.remove()
        case.step(way, 2 * step + 1)


@distributed(world_size=2)
def test_they_gather_and_reduce_as_one(world: World) -> None:
    case, platform = Case(world, False), world.platform

    def counted(way: str) -> Any:
        with count_collectives() as found:
            platform.backward([case.loss(case.model, way, world.rank, 0)])
        return found

    for _ in range(2):
        # The three: before forward and before backward; the root's head once. Those that do not run are gathered with the others.
        for way in ("abc", "cab", "b"):
            counted(way).assert_counts(all_gather=3, reduce_scatter=2)
    with count_collectives() as found, platform.no_grad():
        case.loss(case.model, "ab", world.rank, 0)
    found.assert_counts(all_gather=2)


@distributed(world_size=2)
def test_modules_inside_of_listed_ones_are_theirs(world: World) -> None:
    model = build(world)
    listed = [model.a, model.a.inner, model.b, model.a]
    assert fully_shard(listed, make_mesh(world)) is listed
    assert isinstance(model.a, HSDPModule)
    assert not isinstance(model.a.inner, HSDPModule)
    assert model.a._hp_fsdp_unit is model.b._hp_fsdp_unit
    assert model.a._hp_fsdp_unit.modules == (model.a, model.b)
