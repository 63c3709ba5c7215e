"""A backward that fails leaves nothing behind: not for the next backward, and not in gradients that were cleared since."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_fsdp import fully_shard
from hp_fsdp.states import ShardState
from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from attack_pairs import Pair
from fsdp_models import Maker, local


def four_layers(maker: Maker) -> Any:
    def setup(module: Any) -> None:
        module.layers = maker.platform.ModuleList([maker.linear(4, 4) for _ in range(4)])
        module.between: Any = None

    def forward(module: Any, x: Any, rank: int) -> Any:
        for at, layer in enumerate(module.layers):
            x = maker.platform.silu(layer(x))
            if module.between == at:
                maker.platform.register_tensor_hook(x, _fail)
        return x

    return maker.model(setup, forward)


def _fail(_: Any) -> None:
    raise RuntimeError("in the middle of backward")


def shard_layers(model: Any, mesh: Any) -> None:
    for layer in list(model.layers)[:3]:
        fully_shard(layer, mesh)
    fully_shard(model, mesh)


def failing_loss(pair: Pair, at: int) -> Any:
    pair.sharded.between = at
    try:
        return pair.loss(0)
    finally:
        pair.sharded.between = None


@pytest.mark.parametrize("at", [0, 1])
@distributed(world_size=2)
def test_another_backward_may_follow_without_a_forward_between(world: World, at: int) -> None:
    pair = Pair(world, four_layers, shard_layers)
    failing, loss = failing_loss(pair, at), pair.loss(1)
    with pytest.raises(RuntimeError, match="in the middle of backward"):
        pair.backward(failing)
    pair.sharded.zero_grad()
    pair.backward(loss)
    pair.backward(pair.reference_loss(1))
    pair.check()
    assert all(unit.state is ShardState.SHARDED for unit in pair.units)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
@distributed(world_size=2)
def test_clearing_gradients_after_a_failed_backward_leaves_shards(world: World, at: int) -> None:
    pair, platform = Pair(world, four_layers, shard_layers), world.platform
    own = dict(platform.named_parameters(pair.sharded))
    pair.backward(pair.loss(0))  # so that units look ahead
    pair.sharded.zero_grad()
    with pytest.raises(RuntimeError, match="in the middle of backward"):
        pair.backward(failing_loss(pair, at))
    pair.sharded.zero_grad()
    found = dict(platform.named_parameters(pair.sharded))
    assert list(found) == list(own)
    assert all(found[name] is own[name] for name in own)
    assert all(unit.state is ShardState.SHARDED for unit in pair.units[1:])
    pair.backward(pair.loss(1))
    pair.backward(pair.reference_loss(1))
    pair.check()


@pytest.mark.parametrize("at", [0, 1])
@distributed(world_size=2)
def test_gradients_that_an_optimizer_has_cleared_do_not_come_back(world: World, at: int) -> None:
    pair, platform = Pair(world, four_layers, shard_layers), world.platform
    with pytest.raises(RuntimeError, match="in the middle of backward"):
        pair.backward(failing_loss(pair, at))
    for _, parameter in platform.named_parameters(pair.sharded):  # as optimizer.zero_grad() does
        platform.set_grad(local(parameter), None)
    pair.backward(pair.loss(1))
    pair.backward(pair.reference_loss(1))
    pair.check()


@distributed(world_size=2)
def test_what_waits_for_a_synchronisation_outlives_a_backward_that_fails(world: World) -> None:
    pair = Pair(world, four_layers, shard_layers)
    pair.sharded.set_requires_gradient_sync(False)
    pair.backward(pair.loss(3))
    pair.backward(pair.reference_loss(3))
    with pytest.raises(RuntimeError, match="in the middle of backward"):
        pair.backward(failing_loss(pair, 3))
    pair.sharded.set_requires_gradient_sync(True)
    pair.backward(pair.loss(1))
    pair.backward(pair.reference_loss(1))
    pair.check()
