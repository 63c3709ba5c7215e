"""Wrong uses of ``DropoutParallel`` are told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Replicate, Shard, parallelize_module
from hp_platform.testing import World, distributed
from hp_tp import DropoutParallel

sys.path.insert(0, str(Path(__file__).parent))
from dropout_models import stock_dropout
from tp_models import Maker, make_mesh
from tp_training import local


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"input_layouts": "tp"},
            "input_layouts must be a placement such as Shard\\(-1\\), or one per mesh dim, got 'tp'",
        ),
        ({"input_layouts": ()}, "input_layouts must be a placement"),
        (
            {"input_layouts": Shard(1), "sizes": [5]},
            r"sizes maps dims that are cut to their whole sizes, .* got \[5\]",
        ),
        ({"input_layouts": Shard(1), "sizes": {1: 2.0}}, "sizes maps dims that are cut"),
        ({"input_layouts": Shard(1), "sizes": {-1: 5}}, "sizes names dim -1, but input_layouts cuts 1"),
        ({"sizes": {1: 5}}, "sizes names dim 1, but input_layouts cuts none"),
        ({"use_local_output": 1}, "use_local_output must be True or False, got 1"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DropoutParallel(**arguments)


@distributed(world_size=2)
def test_modules_meshes_and_inputs_that_do_not_fit_are_refused(world: World) -> None:
    mesh, maker = make_mesh(world), Maker(world)
    with pytest.raises(
        ValueError, match="takes a layer without parameters, .* has weight, bias: name the dropout"
    ):
        parallelize_module(maker.linear(2, 3), mesh, DropoutParallel())
    with pytest.raises(ValueError, match="DropoutParallel takes a dropout layer, got float"):
        DropoutParallel().apply(0.5, mesh)
    with pytest.raises(
        ValueError, match="input_layouts has 2 placements, .* has 1 dims: give one per mesh dim"
    ):
        parallelize_module(stock_dropout(world), mesh, DropoutParallel(input_layouts=(Shard(0), Replicate())))
    style = DropoutParallel(input_layouts=Shard(1), sizes={1: 6})
    layer = parallelize_module(stock_dropout(world), mesh, style)
    with pytest.raises(ValueError, match="DropoutParallel of Dropout.* takes one tensor, got list"):
        layer([1.0])
    with pytest.raises(
        ValueError,
        match=r"DropoutParallel of Dropout.*: the local tensor has shape \(2, 2\), but the piece of",
    ):
        layer(maker.tensor(2, 2))
    assert local(layer(maker.tensor(2, 3))).shape == (2, 3)
