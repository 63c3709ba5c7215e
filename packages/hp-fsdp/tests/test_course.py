"""The course of a step and its variations: accumulation, several forwards, dropped losses, failures, odd outputs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DTensor
from hp_fsdp import HSDPModule, fully_shard
from hp_fsdp.unit import units_in
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import (
    PROGRAMS,
    Maker,
    local,
    loss_of,
    make_mesh,
    numpy_of,
    sgd_step,
    tolerance,
    whole,
)


class Twins:
    """The same model unsharded and sharded, with the same losses of all ranks at hand."""

    def __init__(self, world: World, name: str = "mlp", **kwargs: Any) -> None:
        self.world, self.platform, self.program = world, world.platform, PROGRAMS[name]
        self.reference = self.program.build(Maker(world))
        self.shapes = {n: tuple(p.shape) for n, p in self.platform.named_parameters(self.reference)}
        self.mesh = make_mesh(world)
        self.sharded = self.program.shard(self.program.build(Maker(world)), self.mesh, **kwargs)

    def loss(self, batch: int) -> Any:
        """The sharded model's, of this rank's samples."""
        inputs = self.program.inputs(Maker(self.world), self.world.rank, batch)
        return loss_of(self.platform, self.sharded(inputs, rank=self.world.rank))

    def reference_loss(self, batch: int) -> Any:
        """The unsharded model's, the mean over all ranks."""
        losses = [
            loss_of(
                self.platform, self.reference(self.program.inputs(Maker(self.world), rank, batch), rank=rank)
            )
            for rank in range(self.world.size)
        ]
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total / self.world.size

    def backward(self, *losses: Any) -> None:
        self.platform.backward(list(losses))

    def step(self) -> None:
        sgd_step(self.platform, self.reference)
        sgd_step(self.platform, self.sharded)

    def check(self, what: str = "grad") -> None:
        platform = self.platform
        value = platform.get_grad if what == "grad" else platform.detach
        assert_parity(
            whole(self.world, self.sharded, self.shapes, self.mesh, value),
            numpy_of(platform, self.reference, value),
            **tolerance(self.world),
            name=what,
        )


@pytest.mark.parametrize("name", ["mlp", "branches", "scalars", "tied"])
@distributed(world_size=2)
def test_gradients_of_several_backwards_add_up(world: World, name: str) -> None:
    twins = Twins(world, name)
    for batch in range(3):
        twins.backward(twins.loss(batch))
        twins.backward(twins.reference_loss(batch))
    twins.check()


@pytest.mark.parametrize("name", ["mlp", "branches", "scalars", "tied"])
@distributed(world_size=2)
def test_without_synchronisation_gradients_wait_whole_and_then_add_up(world: World, name: str) -> None:
    twins, platform = Twins(world, name), world.platform
    for batch in range(3):
        twins.sharded.set_requires_gradient_sync(batch == 2)
        twins.backward(twins.loss(batch))
        twins.backward(twins.reference_loss(batch))
        if batch < 2:
            assert all(platform.get_grad(p) is None for _, p in platform.named_parameters(twins.sharded))
    twins.check()


@distributed(world_size=2)
def test_a_unit_that_only_ran_without_synchronisation_is_reduced_with_the_others(world: World) -> None:
    platform = world.platform

    def build() -> Any:
        maker = Maker(world)

        def setup(module: Any) -> None:
            module.choices = platform.ModuleList([maker.block(4, 5), maker.block(4, 5)])

        return maker.model(setup, lambda module, x, which: module.choices[which](x))

    reference, model, mesh = build(), build(), make_mesh(world)
    shapes = {n: tuple(p.shape) for n, p in platform.named_parameters(reference)}
    for choice in model.choices:
        fully_shard(choice, mesh)
    fully_shard(model, mesh)
    for which in (0, 1):
        model.set_requires_gradient_sync(which == 1)
        inputs = PROGRAMS["mlp"].inputs(Maker(world), 0, which)  # the same on all ranks
        for each in (reference, model):
            platform.backward([loss_of(platform, each(inputs, which))])
    assert_parity(
        whole(world, model, shapes, mesh, platform.get_grad),
        numpy_of(platform, reference, platform.get_grad),
        **tolerance(world),
    )


@distributed(world_size=2)
def test_two_forwards_and_then_two_backwards_in_either_order(world: World) -> None:
    for order in ((0, 1), (1, 0)):
        twins = Twins(world)
        losses = [twins.loss(0), twins.loss(1)]
        for place in order:
            twins.backward(losses[place])
        for batch in range(2):
            twins.backward(twins.reference_loss(batch))
        twins.check()


@distributed(world_size=2)
def test_two_forwards_and_one_backward_over_both(world: World) -> None:
    for name in ("mlp", "twice"):
        twins = Twins(world, name)
        twins.backward(twins.loss(0) + twins.loss(1))
        twins.backward(twins.reference_loss(0) + twins.reference_loss(1))
        twins.check()


@distributed(world_size=2)
def test_a_forward_whose_loss_is_dropped_leaves_no_old_parameters_behind(world: World) -> None:
    for options in ({}, {"reshard_after_forward": False}):
        twins = Twins(world, **options)
        twins.loss(0)  # the root keeps its parameters for a backward that never comes
        for batch in (1, 2):
            twins.backward(twins.loss(batch))
            twins.backward(twins.reference_loss(batch))
            dropped = twins.loss(batch)
            twins.step()
            assert dropped is not None
        twins.check("parameters")


@distributed(world_size=2)
def test_evaluation_between_training_steps_sees_the_present_parameters(world: World) -> None:
    twins, platform = Twins(world), world.platform
    for batch in range(2):
        twins.backward(twins.loss(batch))
        twins.backward(twins.reference_loss(batch))
        with platform.no_grad():
            twins.loss(batch)
        twins.step()
        inputs = twins.program.inputs(Maker(world), world.rank, batch)
        with platform.no_grad():
            assert_parity(twins.sharded(inputs), twins.reference(inputs), **tolerance(world))
    twins.check("parameters")


@distributed(world_size=2)
def test_a_graph_that_is_kept_can_be_walked_twice(world: World) -> None:
    twins, platform = Twins(world), world.platform
    for loss in (twins.loss(0), twins.reference_loss(0)):
        platform.backward([loss], retain_graph=True)
        platform.backward([loss])
    twins.check()


@distributed(world_size=2)
def test_training_goes_on_after_a_forward_that_failed(world: World) -> None:
    twins, platform = Twins(world), world.platform
    block = platform.get_submodule(twins.sharded, "blocks.1")

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle of forward")

    handle = platform.register_forward_pre_hook(block, fail)
    with pytest.raises(RuntimeError, match="in the middle of forward"):
        twins.loss(0)
    handle.remove()
    for batch in range(2):
        twins.backward(twins.loss(batch))
        twins.backward(twins.reference_loss(batch))
        twins.step()
    twins.check("parameters")


@distributed(world_size=2)
def test_training_goes_on_after_a_backward_that_failed(world: World) -> None:
    twins, platform = Twins(world), world.platform
    inputs = platform.set_requires_grad_(twins.program.inputs(Maker(world), world.rank, 0), True)

    def fail(_: Any) -> None:
        raise RuntimeError("in the middle of backward")

    platform.register_tensor_hook(inputs, fail)
    with pytest.raises(RuntimeError, match="in the middle of backward"):
        twins.backward(loss_of(platform, twins.sharded(inputs)))
    twins.sharded.zero_grad()
    for batch in range(2):
        twins.backward(twins.loss(batch))
        twins.backward(twins.reference_loss(batch))
        twins.step()
    twins.check("parameters")


@distributed(world_size=2)
def test_whole_parameters_are_there_after_unshard_and_gone_after_reshard(world: World) -> None:
    twins, platform = Twins(world), world.platform
    head = platform.get_submodule(twins.sharded, "head")
    expected = numpy_of(platform, twins.reference, platform.detach)["head.weight"]
    twins.sharded.unshard()
    assert np.array_equal(platform.to_numpy(head.weight), expected)
    twins.sharded.reshard()
    assert tuple(local(head.weight).shape) == ((2, 4) if world.rank == 0 else (1, 4))


@pytest.mark.parametrize(
    "has_backward", [True, False], ids=["kept behind backward", "of a loss that was dropped"]
)
@distributed(world_size=2)
def test_unshard_gathers_anew_what_was_written_since_the_last_pass(world: World, has_backward: bool) -> None:
    twins, platform = Twins(world), world.platform
    twins.sharded.set_reshard_after_backward(not has_backward)
    head = platform.get_submodule(twins.sharded, "head")
    loss = twins.loss(0)
    if has_backward:
        twins.backward(loss)
    for model in (twins.reference, twins.sharded):
        for _, parameter in platform.named_parameters(model):
            platform.set_grad(local(parameter), None)
            platform.mul_(platform.detach(local(parameter)), 0.5)
    twins.sharded.unshard()
    expected = numpy_of(platform, twins.reference, platform.detach)["head.weight"]
    assert np.array_equal(platform.to_numpy(head.weight), expected)
    twins.backward(twins.loss(1))
    twins.backward(twins.reference_loss(1))
    twins.step()
    twins.check("parameters")


@distributed(world_size=2)
def test_unshard_between_forward_and_backward_leaves_what_is_there(world: World) -> None:
    twins, platform = Twins(world), world.platform
    loss = twins.loss(0)
    with count_collectives() as counted:
        twins.sharded.unshard()
    if platform.supports("version_counter", world.device):
        counted.assert_counts()
    twins.sharded.reshard()
    twins.backward(loss)
    twins.backward(twins.reference_loss(0))
    twins.step()
    twins.check("parameters")


@distributed(world_size=2)
def test_memory_of_whole_parameters_is_held_only_while_it_is_needed(world: World) -> None:
    twins, platform = Twins(world), world.platform
    root, *blocks = units_in(platform, twins.sharded)

    def held(unit: Any) -> set[bool]:
        return {platform.storage_nbytes(param.full) > 0 for param in unit.params}

    assert [held(unit) for unit in (root, *blocks)] == [{False}] * 3
    loss = twins.loss(0)
    assert held(root) == {True}, "backward begins with the root"
    assert [held(unit) for unit in blocks] == [{False}] * 2
    twins.backward(loss)
    assert [held(unit) for unit in (root, *blocks)] == [{False}] * 3
    with platform.no_grad():
        twins.loss(0)
    assert [held(unit) for unit in (root, *blocks)] == [{False}] * 3


@distributed(world_size=2)
def test_parameters_are_shards_whenever_neither_forward_nor_backward_runs(world: World) -> None:
    twins, platform = Twins(world), world.platform
    shards = dict(platform.named_parameters(twins.sharded))

    def check() -> None:
        for name, parameter in platform.named_parameters(twins.sharded):
            assert parameter is shards[name]

    check()
    loss = twins.loss(0)
    check()
    twins.backward(loss)
    check()
    assert len(shards) == len(twins.shapes)


@distributed(world_size=2)
def test_zero_grad_clears_everything_also_between_forward_and_backward(world: World) -> None:
    twins, platform = Twins(world), world.platform
    shards = dict(platform.named_parameters(twins.sharded))
    twins.backward(twins.loss(0))
    loss = twins.loss(1)
    twins.sharded.zero_grad()
    assert all(platform.get_grad(p) is None for p in shards.values())
    twins.backward(loss)
    twins.backward(twins.reference_loss(1))
    twins.check()
    twins.sharded.zero_grad(set_to_none=False)
    assert all(not platform.to_numpy(platform.get_grad(local(p))).any() for p in shards.values())


@distributed(world_size=2)
def test_freezing_between_steps_is_seen(world: World) -> None:
    twins, platform = Twins(world), world.platform
    for model in (twins.reference, twins.sharded):
        twins.backward(twins.loss(0) if model is twins.sharded else twins.reference_loss(0))
    twins.step()
    for model in (twins.reference, twins.sharded):
        for name, parameter in platform.named_parameters(model):
            if name.startswith("blocks.0"):
                platform.set_requires_grad_(parameter, False)
    twins.backward(twins.loss(1))
    twins.backward(twins.reference_loss(1))
    twins.check()
    twins.step()
    twins.check("parameters")


@dataclass
class Answer:
    value: Any
    extra: dict[str, Any]


class Closed:
    """Of an unknown class: nobody can look inside."""

    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize("kind", ["dataclass", "dict", "tuple", "closed", "keywords"])
@distributed(world_size=2)
def test_units_take_and_return_nested_values(world: World, kind: str) -> None:
    platform = world.platform
    wrap = {
        "dataclass": lambda x: Answer(x, {"twice": x * 2}),
        "dict": lambda x: {"value": x, "list": [x * 2]},
        "tuple": lambda x: (x, None, (x * 2,)),
        "closed": Closed,
        "keywords": lambda x: x,
    }[kind]
    unwrap = {
        "dataclass": lambda y: y.value + y.extra["twice"],
        "dict": lambda y: y["value"] + y["list"][0],
        "tuple": lambda y: y[0] + y[2][0],
        "closed": lambda y: y.value,
        "keywords": lambda y: y,
    }[kind]

    def build() -> Any:
        maker = Maker(world)

        class Inner(platform.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = maker.linear(4, 4)

            def forward(self, boxed: Any, *, bias: Any) -> Any:
                return wrap(self.linear(boxed["x"]) + bias)

        def setup(module: Any) -> None:
            module.before = maker.linear(4, 4)
            module.inner = Inner()
            module.after = maker.linear(4, 4)

        def forward(module: Any, x: Any, rank: int) -> Any:
            x = module.before(x)
            return module.after(unwrap(module.inner({"x": x, "n": 3}, bias=x)))

        return maker.model(setup, forward)

    reference, model = build(), build()
    shapes = {n: tuple(p.shape) for n, p in platform.named_parameters(reference)}
    mesh = make_mesh(world)
    fully_shard(model.inner, mesh)
    fully_shard(model, mesh)
    inputs = PROGRAMS["mlp"].inputs(Maker(world), 0, 0)  # the same on all ranks
    for each in (reference, model):
        platform.backward([loss_of(platform, each(inputs))])
    assert_parity(
        whole(world, model, shapes, mesh, platform.get_grad),
        numpy_of(platform, reference, platform.get_grad),
        **tolerance(world),
    )
    assert tuple(local(model.inner.linear.weight).shape) == (2, 4)


@distributed(world_size=2)
def test_modules_keep_their_class_and_parameters_their_names_and_ties(world: World) -> None:
    platform = world.platform
    model = PROGRAMS["tied"].build(Maker(world))
    cls, before = type(model), dict(platform.named_parameters(model))
    PROGRAMS["tied"].shard(model, make_mesh(world))
    assert isinstance(model, cls)
    assert isinstance(model, HSDPModule)
    assert type(model).__name__ == "HSDP" + cls.__name__
    after = dict(platform.named_parameters(model))
    assert list(after) == list(before)
    for name, parameter in after.items():
        assert isinstance(parameter, DTensor)
        assert platform.is_parameter(parameter)
        assert tuple(parameter.shape) == tuple(before[name].shape)
    assert model.head.weight is model.embed.weight
    assert tuple(local(model.head.weight).shape) == ((3, 4) if world.rank == 0 else (2, 4))


@distributed(world_size=2)
def test_ignored_parameters_stay_whole_and_are_not_averaged(world: World) -> None:
    platform = world.platform
    model = PROGRAMS["mlp"].build(Maker(world))
    kept = model.head.weight
    fully_shard(model, make_mesh(world), ignored_params=[kept])
    assert tuple(model.head.weight.shape) == (3, 4)
    inputs = PROGRAMS["mlp"].inputs(Maker(world), world.rank, 0)
    platform.backward([loss_of(platform, model(inputs))])
    reference = PROGRAMS["mlp"].build(Maker(world))
    platform.backward([loss_of(platform, reference(inputs))])
    assert_parity(platform.get_grad(kept), platform.get_grad(reference.head.weight), **tolerance(world))
