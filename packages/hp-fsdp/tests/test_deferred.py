"""Models that are built without memory, sharded, and initialised in pieces: hp_dtensor's deferred initialisation, on all backends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import init_empty_weights, init_parameters, random
from hp_fsdp import StateDictOptions, fully_shard, get_model_state_dict
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import Maker, local, loss_of, make_mesh, numpy_of, sgd_step, tolerance, whole


def make(world: World) -> Any:
    """Tied, with a scalar; every module initialises its own parameters."""
    maker = Maker(world)
    platform = maker.platform

    class Drawn(platform.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.weight = maker.parameter(*shape)

        def reset_parameters(self) -> None:
            random.normal_(self.weight, 0.0, 0.5)

    class Block(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = Drawn(5, 4)
            self.scale = maker.parameter()

        def reset_parameters(self) -> None:
            random.uniform_(self.scale, 1.0, 2.0)

        def forward(self, x: Any) -> Any:
            return x + platform.matmul(platform.linear(x, self.outer.weight), self.outer.weight) * self.scale

    class Model(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = Drawn(7, 4)
            self.block = Block()
            self.head = Drawn(7, 4)
            self.head.weight = self.embed.weight

        def forward(self, ids: Any) -> Any:
            return platform.linear(self.block(platform.embedding(ids, self.embed.weight)), self.head.weight)

    return Model()


def ids_of(world: World, rank: int) -> Any:
    return world.platform.tensor([[rank, 3], [2, 6 - rank]], "int64", world.device)


def deferred(world: World, mesh: Any, **options: Any) -> Any:
    with init_empty_weights():
        model = make(world)
    fully_shard(model.block, mesh, **options)
    return fully_shard(model, mesh, **options)


@pytest.mark.parametrize("options", [{}, {"comm_fusion": False}, {"mp_policy": None, "replicate": True}])
@distributed(world_size=(1, 2, 3))
def test_values_and_training_are_those_of_the_unsharded_model(world: World, options: dict[str, Any]) -> None:
    platform, mesh = world.platform, make_mesh(world)
    with init_empty_weights():
        reference = make(world)
    random.manual_seed(5)
    init_parameters(reference, device=world.device)
    with init_empty_weights():
        model = make(world)
    if options.get("replicate"):
        fully_shard(model.block, mesh, replicate_params=[model.block.outer.weight])
        fully_shard(model, mesh, replicate_params=[model.embed.weight])
    else:
        fully_shard(model.block, mesh, **options)
        fully_shard(model, mesh, **options)
    random.manual_seed(5)
    with count_collectives() as counted:
        assert init_parameters(model) is model
    counted.assert_counts()
    assert model.head.weight is model.embed.weight
    shapes = {n: tuple(p.shape) for n, p in platform.named_parameters(reference)}
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in numpy_of(platform, reference, platform.detach).items():
        assert_parity(found[name], value, exact=True, name=name)
    for _ in range(2):
        platform.backward([loss_of(platform, model(ids_of(world, world.rank)))])
        total = loss_of(platform, reference(ids_of(world, 0)))
        for rank in range(1, world.size):
            total = total + loss_of(platform, reference(ids_of(world, rank)))
        platform.backward([total / world.size])
        if not options.get("replicate"):
            assert_parity(
                whole(world, model, shapes, mesh, platform.get_grad),
                numpy_of(platform, reference, platform.get_grad),
                **tolerance(world),
            )
        sgd_step(platform, model)
        sgd_step(platform, reference)
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in numpy_of(platform, reference, platform.detach).items():
        assert_parity(found[name], value, **tolerance(world), name=name)


@distributed(world_size=2)
def test_what_has_no_values_is_named_at_forward_and_at_unshard(world: World) -> None:
    platform, model = world.platform, deferred(world, make_mesh(world))
    for begin in (lambda: model(ids_of(world, 0)), model.unshard):
        with pytest.raises(RuntimeError, match="on the meta device and have no values") as raised:
            begin()
        for name in ("embed.weight", "block.outer.weight", "block.scale"):
            assert name in str(raised.value)
    model.zero_grad()  # nothing to clear, and nothing that fails
    init_parameters(model.block)
    with pytest.raises(RuntimeError, match=r"have no values: embed\.weight\. "):
        model(ids_of(world, 0))
    init_parameters(model)
    with platform.no_grad():
        model(ids_of(world, 0))
    assert tuple(local(model.embed.weight).shape) == ((4, 4) if world.rank == 0 else (3, 4))
