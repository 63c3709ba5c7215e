"""What a step sends: how many collectives, and how many bytes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor.chunk import chunk_length
from hp_platform.testing import World, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import PROGRAMS, Maker, Program, dtype_of, loss_of, make_mesh


def sharded(world: World, name: str, replicas: int = 1, **kwargs: Any) -> tuple[Program, Any, list[tuple]]:
    """The program, its sharded model, and the shapes of all parameters before."""
    program = PROGRAMS[name]
    model = program.build(Maker(world))
    shapes = [tuple(p.shape) for _, p in world.platform.named_parameters(model)]
    return program, program.shard(model, make_mesh(world, replicas), **kwargs), shapes


def step(world: World, program: Program, model: Any) -> None:
    output = model(program.inputs(Maker(world), world.rank, 0), rank=world.rank)
    world.platform.backward([loss_of(world.platform, output)])


def row_numel(shapes: list[tuple], num_shards: int) -> int:
    """Elements of one rank's line in all units together, by hand: padded chunks of dim 0."""
    total = 0
    for shape in shapes:
        numel = chunk_length(shape[0], num_shards)
        for size in shape[1:]:
            numel = numel * size
        total = total + numel
    return total


@distributed(world_size=2)
def test_a_unit_gathers_twice_and_reduces_once_and_the_root_gathers_once(world: World) -> None:
    program, model, shapes = sharded(world, "mlp")  # two blocks, and the head, which is the root's own
    head, blocks = [(3, 4), (3,)], shapes[:-2]
    itemsize = world.platform.itemsize(dtype_of(world))
    for _ in range(2):
        with count_collectives() as counted:
            step(world, program, model)
        counted.assert_counts(all_gather=5, reduce_scatter=3)
        gathered = 2 * row_numel(blocks, world.size) + row_numel(head, world.size)
        assert counted.nbytes("all_gather") == gathered * world.size * itemsize
        # Each line ends with one number per parameter: whether anybody has a gradient for it.
        reduced = row_numel(shapes, world.size) + len(shapes)
        assert counted.nbytes("reduce_scatter") == reduced * world.size * itemsize


@distributed(world_size=2)
def test_a_unit_that_stays_whole_gathers_once(world: World) -> None:
    program, model, _ = sharded(world, "mlp", reshard_after_forward=False)
    for _ in range(2):
        with count_collectives() as counted:
            step(world, program, model)
        counted.assert_counts(all_gather=3, reduce_scatter=3)


@distributed(world_size=2)
def test_the_root_gathers_twice_only_if_it_is_told_to_reshard(world: World) -> None:
    program, model, _ = sharded(world, "mlp")
    model.set_reshard_after_forward(True, recurse=False)
    with count_collectives() as counted:
        step(world, program, model)
    counted.assert_counts(all_gather=6, reduce_scatter=3)


@distributed(world_size=2)
def test_a_module_used_twice_reduces_once(world: World) -> None:
    program, model, _ = sharded(world, "twice")
    with count_collectives() as counted:
        step(world, program, model)
    # Two forwards and one backward; the second use finds in backward what the first left to it.
    counted.assert_counts(all_gather=3, reduce_scatter=1)


@distributed(world_size=2)
def test_frozen_parameters_are_gathered_and_never_reduced(world: World) -> None:
    program, model, _ = sharded(world, "frozen")
    with count_collectives() as counted:
        step(world, program, model)
    # block: half of it trains; still: nothing trains, but gradients pass through; the root's head trains.
    counted.assert_counts(all_gather=5, reduce_scatter=2)


@distributed(world_size=2)
def test_branches_that_differ_between_ranks_change_no_collective(world: World) -> None:
    program, model, _ = sharded(world, "branches")
    with count_collectives() as counted:
        step(world, program, model)
    counted.assert_counts(all_gather=3, reduce_scatter=2)


@distributed(world_size=1)
def test_one_rank_sends_nothing(world: World) -> None:
    for name in PROGRAMS:
        program, model, _ = sharded(world, name)
        with count_collectives() as counted:
            step(world, program, model)
        counted.assert_counts()


@distributed(world_size=2)
def test_evaluation_gathers_once_and_leaves_nothing_gathered(world: World) -> None:
    program, model, _ = sharded(world, "mlp")
    shards = [tuple(p.shape) for _, p in world.platform.named_parameters(model)]
    for _ in range(2):
        with count_collectives() as counted, world.platform.no_grad():
            model(program.inputs(Maker(world), world.rank, 0))
        counted.assert_counts(all_gather=3)
        assert [tuple(p.shape) for _, p in world.platform.named_parameters(model)] == shards


@distributed(world_size=4, backends="torch")
@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_reduce_the_shard_only(world: World, replicas: int) -> None:
    program, model, shapes = sharded(world, "mlp", replicas)
    with count_collectives() as counted:
        step(world, program, model)
    shards = world.size // replicas
    if shards == 1:
        counted.assert_counts(all_reduce=3)
    else:
        counted.assert_counts(all_gather=5, reduce_scatter=3, all_reduce=3)
    line = row_numel(shapes, shards) + len(shapes)
    assert counted.nbytes("all_reduce") == line * world.platform.itemsize(dtype_of(world))


@distributed(world_size=4, backends="torch")
def test_micro_batches_without_synchronisation_reduce_once_together(world: World) -> None:
    program, model, _ = sharded(world, "mlp", replicas=2)
    with count_collectives() as counted:
        for micro_batch in range(4):
            model.set_requires_gradient_sync(micro_batch == 3)
            step(world, program, model)
    counted.assert_counts(all_gather=20, reduce_scatter=3, all_reduce=3)
