"""Parameters that are hung into a model after ``fully_shard`` and train are refused: nobody would reduce their gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Replicate, distribute_tensor
from hp_fsdp import fully_shard
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import PROGRAMS, Maker, local, loss_of, make_mesh, sgd_step, tolerance

REFUSED = (
    r"of Model these parameters were added after fully_shard, and train: {}\. .*would drift apart: add them before fully_shard .*"
    r"freeze them .*ignored_params"
)


def sharded(world: World, **kwargs: Any) -> Any:
    return PROGRAMS["mlp"].shard(PROGRAMS["mlp"].build(Maker(world)), make_mesh(world), **kwargs)


def forward(world: World, model: Any, step: int = 0) -> Any:
    return model(PROGRAMS["mlp"].inputs(Maker(world), world.rank, step))


def train(world: World, model: Any) -> None:
    world.platform.backward([loss_of(world.platform, forward(world, model))])
    sgd_step(world.platform, model)


def add_to_a_block(world: World, model: Any) -> None:
    model.blocks[1].inner.extra = Maker(world).parameter(3)


def add_to_the_root(world: World, model: Any) -> None:
    model.extra = Maker(world).parameter()


def wrap_a_layer(world: World, model: Any) -> None:
    """As adapters are injected: another module around the layer, with parameters of its own."""
    maker, base = Maker(world), model.blocks[0].inner

    class Adapted(world.platform.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.base = base
            self.low = maker.linear(5, 4)

        def forward(self, x: Any) -> Any:
            return self.base(x) + self.low(x)

    world.platform.set_submodule(model, "blocks.0.inner", Adapted())


ADDITIONS: dict[str, tuple[Callable[[World, Any], None], str]] = {
    "in a block": (add_to_a_block, r"'blocks\.1\.inner\.extra'"),
    "in the root": (add_to_the_root, "'extra'"),
    "around a layer": (wrap_a_layer, r"'blocks\.0\.inner\.low\.weight', 'blocks\.0\.inner\.low\.bias'"),
}


@pytest.mark.parametrize("kind", list(ADDITIONS))
@distributed(world_size=2)
def test_one_that_trains_is_refused_by_name_until_it_is_frozen(world: World, kind: str) -> None:
    model = sharded(world)
    add, names = ADDITIONS[kind]
    add(world, model)
    with world.platform.no_grad():
        forward(world, model)  # nothing drifts where nothing trains
    for _ in range(2):
        with pytest.raises(RuntimeError, match=REFUSED.format(names)):
            forward(world, model)
    for name, parameter in world.platform.named_parameters(model):
        if "extra" in name or "low" in name:
            world.platform.set_requires_grad_(parameter, False)
    train(world, model)
    for name, parameter in world.platform.named_parameters(model):
        if "extra" in name or "low" in name:
            world.platform.set_requires_grad_(parameter, True)
    with pytest.raises(RuntimeError, match=REFUSED.format(names)):
        forward(world, model)


@pytest.mark.parametrize("kind", list(ADDITIONS))
@distributed(world_size=2, backends=("torch", "cuda"))
def test_so_it_is_between_steps(world: World, kind: str) -> None:
    model = sharded(world)
    model.set_reshard_after_backward(False)
    for _ in range(2):
        train(world, model)
    add, names = ADDITIONS[kind]
    add(world, model)
    with pytest.raises(RuntimeError, match=REFUSED.format(names)):
        forward(world, model)


@distributed(world_size=2, backends=("torch", "cuda"))
def test_many_are_not_all_named(world: World) -> None:
    model = sharded(world)
    for number in range(7):
        setattr(model.head, f"extra{number}", Maker(world).parameter())
    names = ", ".join(rf"'head\.extra{number}'" for number in range(5))
    with pytest.raises(RuntimeError, match=REFUSED.format(f"{names} and 2 more")):
        forward(world, model)


@distributed(world_size=2)
def test_what_somebody_sees_to_is_not_refused(world: World) -> None:
    platform, mesh, maker = world.platform, make_mesh(world), Maker(world)
    program = PROGRAMS["mlp"]
    model, reference = program.build(maker), program.build(Maker(world))
    alone = maker.parameter(2)
    model.blocks[0].alone = alone
    for block in model.blocks:
        fully_shard(block, mesh, ignored_params=[alone])
    fully_shard(model, mesh, ignored_params=[alone])
    # Another object in the place of an ignored one, buffers, and frozen parameters.
    model.blocks[0].alone = maker.parameter(2)
    platform.register_buffer(model.head, "count", platform.zeros((1,), "float32", world.device))
    model.head.still = maker.parameter(2, requires_grad=False)
    # Units of other roots, before they run and when they have; a DTensor of all ranks; another place of a parameter.
    other = fully_shard(maker.linear(3, 3), mesh)
    other.set_reshard_after_backward(False)
    model.head.other = other
    placed = distribute_tensor(platform.zeros((2,), maker.dtype, world.device), mesh, [Replicate()])
    model.head.placed = platform.parameter(placed)
    model.head.again = model.head.weight
    inputs = program.inputs(Maker(world), 0, 0)  # the same on all ranks
    for _ in range(2):
        platform.backward([loss_of(platform, other(platform.zeros((2, 3), maker.dtype, world.device)))])
        for each in (model, reference):
            platform.backward([loss_of(platform, each(inputs))])
            sgd_step(platform, each)
    after = dict(platform.named_parameters(model))
    for name, parameter in platform.named_parameters(reference):
        assert_parity(after[name], platform.detach(parameter), **tolerance(world), name=name)


@distributed(world_size=2)
def test_a_dtensor_is_not_refused_where_dtensors_stay(world: World) -> None:
    platform, mesh = world.platform, make_mesh(world)

    def placed(shape: tuple[int, ...]) -> Any:
        whole = platform.zeros(shape, Maker(world).dtype, world.device)
        return platform.parameter(distribute_tensor(whole, mesh, [Replicate()]))

    model = Maker(world).linear(3, 4)
    for name, parameter in list(platform.named_parameters(model)):
        platform.set_parameter(model, name, placed(tuple(parameter.shape)))
    fully_shard(model)
    model.extra = placed((2,))
    x = distribute_tensor(platform.zeros((2, 4), Maker(world).dtype, world.device), mesh, [Replicate()])
    platform.backward([loss_of(platform, model(x))])
    assert local(model.bias.grad) is not None


@distributed(world_size=2, backends=("torch", "cuda"))
def test_a_model_is_looked_through_once_while_nothing_is_added(world: World) -> None:
    platform = world.platform
    model = sharded(world)
    train(world, model)
    with pytest.MonkeyPatch.context() as patch:

        def walked(self: Any, module: Any) -> Any:
            raise AssertionError("nothing was added")

        patch.setattr(type(platform), "named_modules", walked)
        for _ in range(2):
            platform.backward([loss_of(platform, forward(world, model))])
