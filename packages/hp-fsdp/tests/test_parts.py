"""Large layers of the root are gathered and reduced by themselves, and can be used outside of their forward."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_fsdp import fully_shard, parts
from hp_fsdp.states import ShardState
from hp_fsdp.unit import units_in
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import PROGRAMS, Maker, check_three_steps, loss_of, make_mesh, numpy_of, tolerance, whole


@pytest.mark.parametrize("name", ["mlp", "tied", "twice", "frozen", "branches", "scalars"])
@distributed(world_size=2)
def test_training_with_parts_equals_one_process(world: World, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MIN_NBYTES", 1)
        check_three_steps(world, PROGRAMS[name])
        check_three_steps(world, PROGRAMS[name], reshard_after_forward=False)


@distributed(world_size=2)
def test_small_layers_stay_with_the_root(world: World) -> None:
    model = PROGRAMS["mlp"].shard(PROGRAMS["mlp"].build(Maker(world)), make_mesh(world))
    model(PROGRAMS["mlp"].inputs(Maker(world), world.rank, 0))
    assert len(list(units_in(world.platform, model))) == 3


class Language:
    """Embedding, a block, and a head of the root, whose weights the root also uses itself."""

    def __init__(self, world: World, uses_outside: bool) -> None:
        platform, maker = world.platform, Maker(world)

        class Model(platform.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = maker.embedding(5, 4)
                self.block = maker.block(4, 6)
                self.scale = maker.parameter(4)
                self.head = maker.linear(3, 4)

            def forward(self, ids: Any) -> Any:
                x = self.block(self.embed(ids)) * self.scale
                if uses_outside:
                    x = x + platform.linear(x, self.embed.weight)[..., :4] * platform.mean(self.head.weight)
                return self.head(x)

        self.model = Model()
        self.inputs = lambda rank: PROGRAMS["tied"].inputs(maker, rank, 0)


@pytest.mark.parametrize("uses_outside", [False, True])
@pytest.mark.parametrize("reshards", [None, True, False])
@distributed(world_size=2)
def test_parameters_of_parts_are_there_for_whoever_uses_them(
    world: World, uses_outside: bool, reshards: bool | None
) -> None:
    platform, mesh = world.platform, make_mesh(world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MIN_NBYTES", 1)
        reference, language = Language(world, uses_outside).model, Language(world, uses_outside)
        model = language.model
        shapes = {n: tuple(p.shape) for n, p in platform.named_parameters(model)}
        fully_shard(model.block, mesh)
        fully_shard(model, mesh)
        if reshards is not None:
            model.set_reshard_after_forward(reshards)
        for _ in range(3):
            total = loss_of(platform, reference(language.inputs(0)))
            total = (total + loss_of(platform, reference(language.inputs(1)))) / 2
            platform.backward([total])
            platform.backward([loss_of(platform, model(language.inputs(world.rank)))])
            assert_parity(
                whole(world, model, shapes, mesh, platform.get_grad),
                numpy_of(platform, reference, platform.get_grad),
                **tolerance(world),
            )
            with platform.no_grad():
                ids = language.inputs(world.rank)
                assert_parity(model(ids), reference(ids), **tolerance(world))
            for unit in units_in(platform, model):
                assert unit.state is ShardState.SHARDED
        expected = 4 if platform.supports("stand_ins", world.device) else 2
        assert len(list(units_in(platform, model))) == expected


@distributed(world_size=2)
def test_a_part_costs_one_reduction_and_one_gather_or_two_if_others_follow_it(world: World) -> None:
    platform, mesh = world.platform, make_mesh(world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MIN_NBYTES", 1)
        language = Language(world, uses_outside=False)
        fully_shard(language.model.block, mesh)
        fully_shard(language.model, mesh)
        for step in range(3):
            with count_collectives() as counted:
                platform.backward([loss_of(platform, language.model(language.inputs(world.rank)))])
            extra = 2 if platform.supports("stand_ins", world.device) else 0
            # The block twice; the root and its two parts once, since they stay whole until backward: the embedding only as
            # long as nobody knows that others follow it.
            again = 1 if extra and step > 0 else 0
            counted.assert_counts(all_gather=3 + extra + again, reduce_scatter=2 + extra)


@distributed(world_size=2)
def test_with_one_collective_per_unit_large_layers_stay_and_ranks_may_leave_them_out(world: World) -> None:
    platform, mesh = world.platform, make_mesh(world)
    maker = Maker(world)

    class Choice(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = maker.embedding(5, 4)
            self.only_rank_0 = maker.linear(4, 4)
            self.head = maker.linear(3, 4)

        def forward(self, ids: Any, rank: int) -> Any:
            x = self.embed(ids)
            return self.head(self.only_rank_0(x) if rank == 0 else x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MIN_NBYTES", 1)
        model = fully_shard(Choice(), mesh, comm_fusion=True)
        with count_collectives() as counted:
            ids = PROGRAMS["tied"].inputs(maker, world.rank, 0)
            platform.backward([loss_of(platform, model(ids, world.rank))])
        counted.assert_counts(all_gather=1, reduce_scatter=1)
        assert platform.get_grad(model.only_rank_0.weight.to_local()) is not None
