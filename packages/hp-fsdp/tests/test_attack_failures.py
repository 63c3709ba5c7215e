"""A backward that fails leaves nothing behind: not for the next backward, and not in gradients that were cleared since."""

from __future__ import annotations

import sys
import time
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


def assert_shards_alone(pair: Pair, own: dict[str, Any], *, has_begun: bool = True) -> None:
    """The model shows its shards, and nothing that is whole has memory, but what is on its way, or kept for a backward that has not
    come to any unit.
    """
    platform = pair.platform
    if pair.world.device_type != "cpu":
        time.sleep(0.05)  # until a thread of the device's has let go of the backward
    found = dict(platform.named_parameters(pair.sharded))
    assert list(found) == list(own)
    assert all(found[name] is own[name] for name in own)
    for unit in pair.units:
        assert unit.state is not ShardState.SHOWN
        assert unit.state is not ShardState.GATHERED or not has_begun
        if unit.state is ShardState.SHARDED and pair.world.size > 1:
            assert all(platform.storage_nbytes(param.full) == 0 for param in unit.params)


@pytest.mark.parametrize("keeps", [False, True], ids=["frees", "keeps whole parameters"])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
@distributed(world_size=2)
def test_whoever_catches_the_exception_of_a_backward_finds_shards(world: World, at: int, keeps: bool) -> None:
    pair, platform = Pair(world, four_layers, shard_layers), world.platform
    own = dict(platform.named_parameters(pair.sharded))
    pair.sharded.set_reshard_after_forward(not keeps)
    pair.sharded.set_reshard_after_backward(not keeps)
    pair.backward(pair.loss(0))  # so that units look ahead
    failing = failing_loss(pair, at)
    try:
        pair.backward(failing)
    except RuntimeError as error:
        assert "in the middle of backward" in str(error)
        assert_shards_alone(pair, own, has_begun=at < 3)  # the last layer's output is the root's
    else:
        raise AssertionError("it did not fail")
    # What is written now counts in the next forward.
    for model in (pair.reference, pair.sharded):
        for _, parameter in platform.named_parameters(model):
            platform.set_grad(local(parameter), None)
            platform.mul_(platform.detach(local(parameter)), 0.5)
    pair.backward(pair.loss(1))
    pair.backward(pair.reference_loss(1))
    pair.check()


@pytest.mark.parametrize("unit", [0, 1, 3])
@distributed(world_size=2)
def test_so_does_whoever_catches_one_of_the_end_of_a_backward(world: World, unit: int) -> None:
    pair, platform = Pair(world, four_layers, shard_layers), world.platform
    own = dict(platform.named_parameters(pair.sharded))
    pair.backward(pair.loss(0))
    failing, other = pair.loss(2), pair.loss(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair.units[unit], "finish_backward", lambda: _fail(None))
        try:
            pair.backward(failing)
        except RuntimeError as error:
            assert "in the middle of backward" in str(error)
            assert_shards_alone(pair, own)
            patch.undo()
            for _, parameter in platform.named_parameters(pair.sharded):
                platform.set_grad(local(parameter), None)
            pair.backward(other)  # while the exception, and what its traceback holds, is there
        else:
            raise AssertionError("it did not fail")
    pair.backward(pair.reference_loss(1))
    pair.check()


@distributed(world_size=2)
def test_shards_are_shown_by_hand_after_a_backward_that_fails_and_gathered_by_hand(world: World) -> None:
    pair, platform = Pair(world, four_layers, shard_layers), world.platform
    own = dict(platform.named_parameters(pair.sharded))
    pair.backward(pair.loss(0))
    with pytest.raises(RuntimeError, match="in the middle of backward"):
        pair.backward(failing_loss(pair, 1))
    for unit in pair.units:
        unit.modules[0].reshard()
    assert all(unit.state is ShardState.SHARDED for unit in pair.units)
    pair.sharded.unshard()
    shown = pair.sharded.layers[3].bias
    assert shown is not own["layers.3.bias"]
    assert tuple(shown.shape) == (4,)
    pair.sharded.reshard()
    assert_shards_alone(pair, own)
