"""A plan is checked as a whole: what does not fit is told with the module's name, and nothing has changed then."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import DTensor, Replicate, Shard
from hp_platform.testing import World, assert_parity, distributed
from hp_tp import (
    ColwiseParallel,
    DropoutParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parent))
from tp_models import Config, make_mesh, model_of
from tp_plans import block_plan, model_plan

CONFIG = Config(heads=5, kv_heads=5, head_dim=2, hidden=5, layers=2, length=4)


def refused(world: World, plan: dict[str, Any], message: str) -> None:
    """The plan is refused, and the model is as before."""
    platform, model = world.platform, model_of(world, CONFIG)
    before = [
        (type(m), [id(p) for _, p in platform.named_parameters(m)]) for _, m in platform.named_modules(model)
    ]
    with pytest.raises(ValueError, match=message):
        parallelize_module(model, make_mesh(world), plan)
    after = [
        (type(m), [id(p) for _, p in platform.named_parameters(m)]) for _, m in platform.named_modules(model)
    ]
    assert after == before


@distributed(world_size=3)
def test_what_does_not_fit_at_the_end_of_a_plan_is_told_before_anything_changes(world: World) -> None:
    plan = block_plan(CONFIG, 1, prefix="layers.*.")
    refused(
        world,
        plan,
        r"^'layers\.0\.attention\.q': ColwiseParallel: 5 heads of this Linear do not divide over [23] ranks",
    )
    good = {"embed": RowwiseParallel(), "layers.*.mlp.up": ColwiseParallel()}
    refused(
        world,
        {**good, "layers.1.attention.v": ColwiseParallel(heads=5)},
        r"^'layers\.1\.attention\.v': ColwiseParallel: 5 heads of this Linear do not divide over [23].*replicate_kv=True",
    )
    refused(
        world,
        {**good, "layers.1.norm1": ColwiseParallel()},
        r"^'layers\.1\.norm1': ColwiseParallel does not know how to cut",
    )
    refused(
        world,
        {**good, "layers.1.mlp": SequenceParallel(local=True)},
        r"^'layers\.1\.mlp': SequenceParallel of MLP",
    )
    refused(
        world,
        {**good, "layers.1.mlp": DropoutParallel()},
        r"^'layers\.1\.mlp': DropoutParallel takes a layer without parameters, MLP has",
    )
    refused(world, {**good, "layers.*.mlp.side": ColwiseParallel()}, r"meets no sub-module of Model")


@distributed(world_size=2)
def test_two_entries_that_cut_one_module_are_told_before_anything_changes(world: World) -> None:
    refused(
        world,
        {"layers.*.mlp.up": ColwiseParallel(), "layers.1.mlp.up": RowwiseParallel()},
        r"^'layers\.1\.mlp\.up': RowwiseParallel would lay out .* that ColwiseParallel of 'layers\.1\.mlp\.up' lays out before: let one",
    )
    refused(
        world,
        {"layers.0": SequenceParallel(), "layers.0.mlp.up": ColwiseParallel()},
        r"^'layers\.0\.mlp\.up': ColwiseParallel would lay out .* that SequenceParallel of 'layers\.0' lays out before",
    )


@distributed(world_size=2)
def test_a_module_in_two_places_has_both_names_and_gets_a_style_once(world: World) -> None:
    platform, mesh = world.platform, make_mesh(world)
    for pattern in ("layers.*.mlp.up", "layers.0.mlp.up", "layers.1.mlp.up", "layers.*.mlp.[ug]*"):
        model = model_of(world, CONFIG)
        first, second = (layer.mlp for layer in model.layers)
        first.gate = second.up = second.gate = first.up
        x = platform.full((2, 4, CONFIG.width), 0.5, first.up.weight.dtype, world.device)
        expected = platform.to_numpy(platform.detach(first.up(x)))
        parallelize_module(model, mesh, {pattern: ColwiseParallel(output_layouts=Replicate())})
        assert second.gate is first.up
        assert first.up.weight.placements == (Shard(0),)
        assert_parity(platform.detach(second.up(x)), expected, rtol=0, atol=1e-6)


@distributed(world_size=1)
def test_what_a_style_puts_in_the_place_of_a_module_hangs_in_all_places(world: World) -> None:
    model = model_of(world, CONFIG)
    first, second = (layer.mlp for layer in model.layers)
    second.up, other = first.up, second.gate

    class Exchange(ParallelStyle):
        def apply(self, module: Any, device_mesh: Any) -> Any:
            return other

    parallelize_module(model, make_mesh(world), {"layers.*.mlp.up": Exchange()})
    assert first.up is second.up is other


@distributed(world_size=2)
def test_what_an_earlier_style_may_put_elsewhere_is_not_asked_before(world: World) -> None:
    """The first style changes the layer so that the second one fits."""
    platform, mesh = world.platform, make_mesh(world)
    model = model_of(world, CONFIG)

    class Exchange(ParallelStyle):
        def apply(self, module: Any, device_mesh: Any) -> Any:
            module.up = module.gate
            return module

    model.layers[0].mlp.up = model.layers[0].norm1
    plan = {"layers.0.mlp": Exchange(), "layers.0.mlp.up": ColwiseParallel()}
    parallelize_module(model, mesh, plan)
    assert isinstance(platform.get_submodule(model, "layers.0.mlp.gate").weight, DTensor)


@distributed(world_size=2)
def test_a_vocabulary_that_does_not_divide_is_cut_all_the_same(world: World) -> None:
    """51 rows are 26 and 25; the numbers are those of one process elsewhere."""
    config = Config(heads=4, kv_heads=2, vocabulary=51, layers=1, length=4)
    model = parallelize_module(model_of(world, config), make_mesh(world), model_plan(config, world.size))
    assert model.embed.weight.local_shape[0] == model.head.weight.local_shape[0] == (26, 25)[world.rank]
