"""Wrong calls are refused at once, with what was given and what to change."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Shard
from hp_platform import DeviceMesh
from hp_platform.testing import World, distributed
from hp_tp import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parent))
from refused_plans import CALLS
from tp_models import Config, Maker, make_mesh, model_of, token_ids
from tp_plans import model_plan


@pytest.mark.parametrize("name", list(CALLS))
@distributed(world_size=2)
def test_a_wrong_call_is_refused(world: World, name: str) -> None:
    call = CALLS[name]
    with pytest.raises(call.error, match=f"(?s){call.message}"):
        call.run(world)


def test_there_are_many_wrong_calls() -> None:
    assert len(CALLS) >= 40


@distributed(world_size=2)
def test_a_call_that_is_refused_names_the_module_in_the_model(world: World) -> None:
    config = Config(heads=4, kv_heads=2, hidden=6, length=3, layers=1)
    plan = {**model_plan(config, world.size), "layers.*.mlp.down": RowwiseParallel(output_layouts=Shard(1))}
    model = parallelize_module(model_of(world, config), make_mesh(world), plan)
    message = r"RowwiseParallel of Linear: dim 1 of size 3 does not divide over 2 ranks.*; in Model 'layers\.0\.mlp\.down' \(Linear\)$"
    with pytest.raises(ValueError, match=message):
        model(token_ids(world, config)[0])


@distributed(world_size=2)
def test_a_rank_outside_of_the_mesh_is_told_so(world: World) -> None:
    mesh = DeviceMesh(world.device_type, [0])
    layer = Maker(world).linear(4, 4)
    if world.rank == 0:
        assert parallelize_module(layer, mesh, ColwiseParallel()) is layer
    else:
        with pytest.raises(
            RuntimeError, match="ColwiseParallel: this rank is not in .*lay it out on ranks of the mesh only"
        ):
            parallelize_module(layer, mesh, ColwiseParallel())


@distributed(world_size=2)
def test_a_refused_style_leaves_the_module_as_it_was(world: World) -> None:
    platform = world.platform
    layer: Any = Maker(world).linear(6, 9)
    before = type(layer), {name: id(p) for name, p in platform.named_parameters(layer)}
    for style in (ColwiseParallel(heads=3), ColwiseParallel(parts=[4, 4]), ColwiseParallel(heads=5)):
        with pytest.raises(ValueError, match="ColwiseParallel"):
            parallelize_module(layer, make_mesh(world), style)
    assert (type(layer), {name: id(p) for name, p in platform.named_parameters(layer)}) == before
