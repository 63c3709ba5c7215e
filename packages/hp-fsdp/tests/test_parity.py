"""Sharded training gives the numbers of one process: outputs, every gradient, parameters after three steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hp_platform.testing import World, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import PROGRAMS, check_three_steps


@pytest.mark.parametrize("name", list(PROGRAMS))
@distributed(world_size=(1, 2, 3, 4))
def test_training_sharded_equals_training_in_one_process(world: World, name: str) -> None:
    check_three_steps(world, PROGRAMS[name])


@pytest.mark.parametrize("name", ["mlp", "twice", "branches"])
@distributed(world_size=2)
def test_so_it_does_when_parameters_stay_whole_between_forward_and_backward(world: World, name: str) -> None:
    check_three_steps(world, PROGRAMS[name], reshard_after_forward=False)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("name", ["mlp", "branches", "scalars"])
@distributed(world_size=4, backends="torch")
def test_so_it_does_on_a_mesh_that_replicates_and_shards(world: World, name: str, replicas: int) -> None:
    check_three_steps(world, PROGRAMS[name], replicas=replicas)
