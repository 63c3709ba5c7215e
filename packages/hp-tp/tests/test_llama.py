"""A Llama-like layer and a whole model under tensor and sequence parallel styles, against one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from tp_models import (
    Config,
    activation,
    block_of,
    block_plan,
    check_steps,
    cross_entropy,
    mean_square,
    model_of,
    model_plan,
    token_ids,
)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
@distributed(world_size=(1, 2, 3))
def test_three_steps_of_a_model_are_those_of_one_process(world: World, sequence: bool, tied: bool) -> None:
    config = Config(tied=tied)

    def loss_of(model: Any, step: int) -> Any:
        ids, targets = token_ids(world, config, step)
        return cross_entropy(world.platform, model(ids), targets)

    check_steps(
        world, lambda: model_of(world, config), model_plan(config, world.size, sequence=sequence), loss_of
    )


@distributed(world_size=(1, 2, 3))
def test_three_steps_of_a_layer_are_those_of_one_process(world: World) -> None:
    config = Config()

    def loss_of(layer: Any, step: int) -> Any:
        return mean_square(world.platform, layer(activation(world, config, step)))

    check_steps(world, lambda: block_of(world, config), block_plan(config, world.size), loss_of)
