"""Gradients that are none, that wait while parameters are frozen, and that would be of two values of a parameter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_fsdp import fully_shard
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from attack_pairs import Pair
from fsdp_models import Maker, local


def half_used(maker: Maker) -> Any:
    """A unit that takes two arguments and uses one."""

    class First(maker.platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = maker.linear(4, 4)

        def forward(self, x: Any, y: Any) -> Any:
            return self.layer(x)

    def setup(module: Any) -> None:
        module.used, module.unused = maker.linear(4, 4), maker.linear(4, 4)
        module.unit = First()

    return maker.model(setup, lambda module, x, rank: module.unit(module.used(x), module.unused(x)))


def three_layers(maker: Maker) -> Any:
    def setup(module: Any) -> None:
        module.layers = maker.platform.ModuleList([maker.linear(4, 4) for _ in range(3)])

    def forward(module: Any, x: Any, rank: int) -> Any:
        for layer in module.layers:
            x = maker.platform.silu(layer(x))
        return x

    return maker.model(setup, forward)


def shard_layers(model: Any, mesh: Any) -> None:
    for layer in list(model.layers)[1:]:
        fully_shard(layer, mesh)
    fully_shard(model, mesh)


@distributed(world_size=2)
def test_what_a_unit_does_not_use_of_its_arguments_gets_no_gradient(world: World) -> None:
    def shard(model: Any, mesh: Any) -> None:
        fully_shard(model.unit, mesh)
        fully_shard(model, mesh)

    pair = Pair(world, half_used, shard)
    pair.backward(pair.loss())
    pair.backward(pair.reference_loss())
    pair.check()


@distributed(world_size=2)
def test_a_gradient_that_waits_is_reduced_though_its_parameter_was_frozen_since(world: World) -> None:
    pair, platform = Pair(world, three_layers, shard_layers), world.platform
    for batch in range(3):
        pair.sharded.set_requires_gradient_sync(batch == 2)
        for model in (pair.sharded, pair.reference):
            frozen = list(model.layers)[1].weight
            platform.set_requires_grad_(frozen, batch != 1)
            if batch == 2:
                platform.set_requires_grad_(frozen, False)
        pair.backward(pair.loss(batch))
        pair.backward(pair.reference_loss(batch))
    pair.check()


@distributed(world_size=2)
def test_a_gradient_of_one_rank_that_waits_is_reduced_though_nobody_reaches_its_unit_again(
    world: World,
) -> None:
    def with_a_branch(maker: Maker) -> Any:
        def setup(module: Any) -> None:
            module.always, module.branch = maker.linear(4, 4), maker.linear(4, 4)
            module.ranks_of_branch = ()

        def forward(module: Any, x: Any, rank: int) -> Any:
            x = module.always(x)
            found = module.branch(x)  # all ranks call, as they must
            return found if rank in module.ranks_of_branch else x

        return maker.model(setup, forward)

    def shard(model: Any, mesh: Any) -> None:
        fully_shard(model.branch, mesh, reshard_after_forward=False)
        fully_shard(model, mesh)

    pair = Pair(world, with_a_branch, shard)
    for batch, ranks in enumerate([(0,), ()]):
        pair.sharded.set_requires_gradient_sync(batch == 1)
        for model in (pair.sharded, pair.reference):
            model.ranks_of_branch = ranks
        pair.backward(pair.loss(batch))
        pair.backward(pair.reference_loss(batch))
    pair.check()


@distributed(world_size=2)
def test_parameters_written_between_a_forward_and_its_backward_are_refused(world: World) -> None:
    pair, platform = Pair(world, three_layers, shard_layers), world.platform
    losses = [pair.loss(0), pair.loss(1)]
    pair.backward(losses[0])
    for _, parameter in platform.named_parameters(pair.sharded):
        platform.mul_(local(parameter), 2.0)
    if platform.supports("version_counter", world.device):
        with pytest.raises(RuntimeError, match="written between a forward and its backward"):
            pair.backward(losses[1])
    pair.sharded.zero_grad()
    for _, parameter in platform.named_parameters(pair.reference):
        platform.mul_(parameter, 2.0)
    pair.backward(pair.loss(2))
    pair.backward(pair.reference_loss(2))
    pair.check()
