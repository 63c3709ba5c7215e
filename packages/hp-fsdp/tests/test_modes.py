"""What is special about modes: two cuts of one dim, several modules as one unit, parameters that are not cut, small worlds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DTensor, Partial, Replicate, Shard, StridedShard, distribute_tensor
from hp_fsdp import fully_shard
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

sys.path.insert(0, str(Path(__file__).parent))
from fsdp_models import (
    PROGRAMS,
    Maker,
    check_three_steps,
    dtype_of,
    local,
    loss_of,
    make_mesh,
    sgd_step,
    tolerance,
)
from matrix_modes import piece_of

ROWS = (17, 1, 2, 3, 5)


# ------------------------------------------------------------------------------------------- two cuts of one dim (unified)
def rows_model(world: World) -> Any:
    """One linear layer for each number of rows; their sums are added."""
    maker = Maker(world)
    platform = maker.platform

    def setup(module: Any) -> None:
        module.layers = platform.ModuleList([maker.linear(rows, 4) for rows in ROWS])

    def forward(module: Any, x: Any, rank: int) -> Any:
        total = None
        for layer in module.layers:
            y = platform.sum(platform.silu(layer(x)), -1, keepdim=True)
            total = y if total is None else total + y
        return total

    return maker.model(setup, forward)


def cut_by_tp(world: World, model: Any, mesh: DeviceMesh, dim: int) -> None:
    """Weights along ``dim``, biases along their only one."""
    platform = world.platform
    for _, module in platform.named_modules(model):
        for name, parameter in list(platform.named_parameters(module, recurse=False)):
            placement = Shard(min(dim, parameter.ndim - 1))
            cut = distribute_tensor(platform.detach(parameter), mesh, [placement])
            platform.set_parameter(module, name, platform.parameter(cut))


@pytest.mark.parametrize(
    "dims", [(0, 0), (1, 1), (0, 1), (1, 0)], ids=["rows", "columns", "rows first", "columns first"]
)
@distributed(world_size=(2, 3, 4))
def test_few_rows_cut_by_both_kinds_of_ranks_train_as_in_one_process(
    world: World, dims: tuple[int, int]
) -> None:
    """``dims``: which one tensor-parallel and which one data-parallel ranks cut."""
    platform, (tp_dim, dp_dim), limits = world.platform, dims, tolerance(world)
    for tp in sorted({1, 2, world.size}):
        if world.size % tp:
            continue
        mesh = init_device_mesh(world.device_type, (world.size // tp, tp), mesh_dim_names=("dp", "tp"))
        dp_rank, tp_rank = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
        num_dp = world.size // tp
        reference, model = rows_model(world), rows_model(world)
        cut_by_tp(world, model, mesh["tp"], tp_dim)
        fully_shard(model, mesh["dp"], shard_placement_fn=lambda p: Shard(min(dp_dim, len(p.shape) - 1)))

        def piece(
            whole: Any, tp: int = tp, tp_rank: int = tp_rank, num_dp: int = num_dp, dp_rank: int = dp_rank
        ) -> Any:
            whole = platform.to_numpy(platform.detach(whole))
            last = whole.ndim - 1
            return piece_of(
                piece_of(whole, min(tp_dim, last), tp, tp_rank), min(dp_dim, last), num_dp, dp_rank
            )

        for step in range(2):
            inputs = [PROGRAMS["mlp"].inputs(Maker(world), rank, step) for rank in range(num_dp)]
            mine = DTensor.from_local(inputs[dp_rank], mesh["tp"], [Replicate()])
            platform.backward([loss_of(platform, model(mine))])
            for x in inputs:
                platform.backward([loss_of(platform, reference(x)) / num_dp])
            for (name, shard), (_, whole) in zip(
                platform.named_parameters(model), platform.named_parameters(reference), strict=True
            ):
                gradient = platform.get_grad(whole)
                assert_parity(platform.get_grad(local(shard)), piece(gradient), **limits, name=name)
                assert_parity(shard.grad, gradient, **limits, name=name)
            sgd_step(platform, model)
            sgd_step(platform, reference)
        for (name, shard), (_, whole) in zip(
            platform.named_parameters(model), platform.named_parameters(reference), strict=True
        ):
            assert_parity(platform.detach(local(shard)), piece(whole), **limits, name=name)
            assert_parity(platform.detach(shard), platform.detach(whole), **limits, name=name)


@distributed(world_size=4, backends="torch")
def test_a_dim_that_both_cut_is_strided_for_data_parallel_ranks(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = rows_model(world)
    cut_by_tp(world, model, mesh["tp"], 0)
    fully_shard(model, mesh["dp"])
    assert model.layers[0].weight.placements == (StridedShard(0, 2), Shard(0))
    assert tuple(model.layers[0].weight.shape) == (17, 4)
    # 17 rows are 9 and 8 for tensor-parallel ranks, and these are 5 and 4, or 4 and 4.
    sizes = {(0, 0): 5, (1, 0): 4, (0, 1): 4, (1, 1): 4}
    assert local(model.layers[0].weight).shape[0] == sizes[mesh.get_coordinate()]


@distributed(world_size=2)
def test_partial_gradients_of_tensor_parallel_ranks_are_reduced_by_their_operations(world: World) -> None:
    """A norm's weight is whole on all ranks, its input is cut (sequence parallel): the gradient is the whole one, not a rank's."""
    platform, maker = world.platform, Maker(world)
    mesh = init_device_mesh(world.device_type, (1, 2), mesh_dim_names=("dp", "tp"))

    def build() -> Any:
        maker = Maker(world)
        return maker.model(
            lambda module: setattr(module, "weight", maker.parameter(4)),
            lambda module, x, rank: x * module.weight,
        )

    reference, model = build(), build()
    weight = distribute_tensor(platform.detach(model.weight), mesh["tp"], [Replicate()])
    platform.set_parameter(model, "weight", platform.parameter(weight))
    fully_shard(model, mesh["dp"])
    x = platform.tensor(np.arange(20.0).reshape(5, 4) / 10, maker.dtype, world.device)
    platform.backward([loss_of(platform, reference(x))])
    platform.backward([loss_of(platform, model(distribute_tensor(x, mesh["tp"], [Shard(0)])))])
    assert not any(isinstance(placement, Partial) for placement in model.weight.grad.placements)
    assert_parity(model.weight.grad, platform.get_grad(reference.weight), **tolerance(world))


# ------------------------------------------------------------------------------------------ several modules as one unit
@distributed(world_size=(1, 2, 3))
def test_modules_in_a_list_gather_and_reduce_as_one(world: World) -> None:
    program, platform = PROGRAMS["mlp"], world.platform
    reference, model = program.build(Maker(world)), program.build(Maker(world))
    mesh = make_mesh(world)
    blocks = [model.blocks[0], model.blocks[1]]
    assert fully_shard(blocks, mesh) is blocks
    fully_shard(model, mesh)
    for step in range(2):
        inputs = [program.inputs(Maker(world), rank, step) for rank in range(world.size)]
        with count_collectives() as counted:
            platform.backward([loss_of(platform, model(inputs[world.rank]))])
        many = world.size > 1
        # The blocks before forward and before backward, the root's head once.
        counted.assert_counts(all_gather=3 * many, reduce_scatter=2 * many)
        for x in inputs:
            platform.backward([loss_of(platform, reference(x)) / world.size])
        for (name, shard), (_, whole) in zip(
            platform.named_parameters(model), platform.named_parameters(reference), strict=True
        ):
            assert_parity(shard.grad, platform.get_grad(whole), **tolerance(world), name=name)
        sgd_step(platform, model)
        sgd_step(platform, reference)


# ---------------------------------------------------------------------------------------------- parameters not cut
@pytest.mark.parametrize("replicas", [1, 2])
@distributed(world_size=4, backends="torch")
def test_parameters_that_are_not_cut_are_never_gathered(world: World, replicas: int) -> None:
    platform, program = world.platform, PROGRAMS["mlp"]
    model = program.build(Maker(world))
    shapes = {n: tuple(p.shape) for n, p in platform.named_parameters(model)}
    everything = [p for _, p in platform.named_parameters(model)]
    program.shard(model, make_mesh(world, replicas), replicate_params=everything)
    for name, parameter in platform.named_parameters(model):
        assert tuple(local(parameter).shape) == shapes[name]
        assert all(placement == Replicate() for placement in parameter.placements)
    with count_collectives() as counted:
        platform.backward([loss_of(platform, model(program.inputs(Maker(world), world.rank, 0)))])
    # Each unit: the numbers that say who has used what, and the gradients; replicas reduce both together.
    counted.assert_counts(reduce_scatter=3, all_reduce=3 if replicas == 1 else 6)
    numel = sum(int(np.prod(shape)) for shape in shapes.values())
    itemsize = platform.itemsize(dtype_of(world))
    assert counted.nbytes("reduce_scatter") == len(shapes) * (4 // replicas) * itemsize
    expected = numel if replicas == 1 else 2 * numel + len(shapes)
    assert counted.nbytes("all_reduce") == expected * itemsize


@pytest.mark.parametrize("name", ["mlp", "branches", "scalars", "tied", "frozen"])
@distributed(world_size=(2, 4), backends="torch")
def test_training_with_parameters_that_are_not_cut_equals_one_process(world: World, name: str) -> None:
    program, platform = PROGRAMS[name], world.platform
    reference, model = program.build(Maker(world)), program.build(Maker(world))
    everything = [p for _, p in platform.named_parameters(model)]
    program.shard(model, make_mesh(world), replicate_params=everything)
    for step in range(2):
        for rank in range(world.size):
            x = program.inputs(Maker(world), rank, step)
            platform.backward([loss_of(platform, reference(x, rank=rank)) / world.size])
        x = program.inputs(Maker(world), world.rank, step)
        platform.backward([loss_of(platform, model(x, rank=world.rank))])
        for (each, shard), (_, whole) in zip(
            platform.named_parameters(model), platform.named_parameters(reference), strict=True
        ):
            assert_parity(shard.grad, platform.get_grad(whole), **tolerance(world), name=each)
        sgd_step(platform, model)
        sgd_step(platform, reference)


# --------------------------------------------------------------------------------------------------- small worlds
@pytest.mark.parametrize("name", ["mlp", "twice", "branches", "tied", "uneven"])
@distributed(world_size=4, backends="torch")
def test_training_with_pieces_among_two_neighbours_equals_one_process(world: World, name: str) -> None:
    check_three_steps(world, PROGRAMS[name], reshard_after_forward=2)


@distributed(world_size=4, backends="torch")
def test_backward_gathers_among_neighbours_from_the_first_step_on(world: World) -> None:
    platform, program = world.platform, PROGRAMS["mlp"]
    mesh = make_mesh(world)
    model = program.shard(program.build(Maker(world)), mesh, reshard_after_forward=2)
    for step in range(3):
        with count_collectives() as counted:
            platform.backward([loss_of(platform, model(program.inputs(Maker(world), world.rank, step)))])
        counted.assert_counts(all_gather=5, reduce_scatter=3)
        sizes = sorted(launch.group.size for launch in counted.record.launches if launch.kind == "all_gather")
        assert sizes == [2, 2, 4, 4, 4]


@distributed(world_size=4, backends="torch")
def test_pieces_of_a_dropped_forward_do_not_outlive_the_step(world: World) -> None:
    platform, program = world.platform, PROGRAMS["mlp"]
    reference = program.build(Maker(world))
    model = program.shard(program.build(Maker(world)), make_mesh(world), reshard_after_forward=2)
    x = program.inputs(Maker(world), 0, 0)  # the same on all ranks
    for _ in range(2):
        model(x)  # a loss that nobody asks the gradient of
        for each in (reference, model):
            platform.backward([loss_of(platform, each(x))])
            sgd_step(platform, each)
        with platform.no_grad():
            assert_parity(model(x), reference(x), **tolerance(world))
