"""distribute_module against one process: a user's function cuts, the rest is replicated, ties hold."""

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_dtensor.distributed_module import distribute_module
from hp_platform.testing import World, assert_parity, distributed

sys.path.insert(0, str(Path(__file__).parent))
from layer_programs import check, make, make_mesh, placed_input, tensor

R, S0, S1 = Replicate(), Shard(0), Shard(1)
COLUMNS = ("q", "k", "v", "up")
ROWS = ("o", "down")


def _put(platform: Any, module: Any, name: str, mesh: Any, placement: Any) -> None:
    placements = [placement if dim == "tp" else R for dim in mesh.mesh_dim_names]
    cut = distribute_tensor(getattr(module, name), mesh, placements)
    platform.set_parameter(module, name, platform.parameter(cut))


def _cutter(platform: Any) -> Any:
    def cut(name: str, module: Any, mesh: Any) -> None:
        last = name.rpartition(".")[2]
        if last in COLUMNS:
            _put(platform, module, "weight", mesh, S0)
            _put(platform, module, "bias", mesh, S0)
        elif last in ROWS:
            _put(platform, module, "weight", mesh, S1)

    return cut


def _to_batch(module: Any, inputs: Any, mesh: Any) -> Any:
    (x,) = inputs
    return distribute_tensor(x, mesh, [S0 if name == "dp" else R for name in mesh.mesh_dim_names])


@distributed(world_size=(1, 2, 3))
def test_a_layer_on_a_line_of_ranks(world: World) -> None:
    mesh, module = make_mesh(world), make(world)
    assert distribute_module(module, mesh, _cutter(world.platform)) is module
    forward, backward = check(world, module, placed_input(world, mesh))
    if world.size > 1:
        # Sums are reduced where they meet what is not linear: into the MLP, and squared.
        forward.assert_counts(all_reduce=2)
        backward.assert_counts(all_reduce=2)


@distributed(world_size=4, backends=("torch", "cuda"))
def test_a_layer_on_a_grid(world: World) -> None:
    mesh, module = make_mesh(world, grid=True), make(world)
    distribute_module(module, mesh, _cutter(world.platform))
    forward, backward = check(world, module, placed_input(world, mesh))
    forward.assert_counts(all_reduce=2)
    backward.assert_counts(all_reduce=14)


@distributed(world_size=2)
def test_functions_at_the_doors_of_the_current_mesh(world: World) -> None:
    mesh, module = make_mesh(world), make(world)
    seen = []

    def whole(module: Any, output: Any, mesh: Any) -> Any:
        seen.append((type(module).__name__, mesh.shape))
        return output.redistribute(placements=[R])

    with mesh:
        distribute_module(module, partition_fn=_cutter(world.platform), output_fn=whole)
    result = module(placed_input(world, mesh))
    assert result.placements == (R,)
    assert seen == [("Layer", (2,))]


@distributed(world_size=2)
def test_the_old_form_of_the_functions_is_taken_with_a_warning(world: World) -> None:
    mesh, module = make_mesh(world), make(world, "MLP")
    with pytest.warns(FutureWarning, match=r"input_fn with two arguments \(inputs, mesh\) is the old form"):
        distribute_module(module, mesh, input_fn=lambda inputs, mesh: _to_batch(None, inputs, mesh))
    assert module(tensor(world, 5, 12)).placements == (R,)


@distributed(world_size=(1, 2))
def test_parameters_and_buffers_that_nobody_cut_are_replicated(world: World) -> None:
    p, module = world.platform, make(world, "Tied")
    distribute_module(module, make_mesh(world))
    tensors = {**dict(p.named_parameters(module)), **dict(p.named_buffers(module))}
    assert {name: x.placements for name, x in tensors.items()} == dict.fromkeys(
        ("first.weight", "first.bias", "last.bias", "table"), (R,)
    )
    assert module.first.weight is module.last.weight
    assert_parity(module.table, make(world, "Tied").table, exact=True)


@pytest.mark.parametrize("cut", [("first",), ("last",), ("first", "last")])
@distributed(world_size=(2, 3))
def test_a_tied_weight_stays_one_parameter(cut: tuple[str, ...], world: World) -> None:
    mesh, module = make_mesh(world), make(world, "Tied")

    def partition(name: str, submodule: Any, mesh: Any) -> None:
        if name in cut:
            _put(world.platform, submodule, "weight", mesh, S0)

    distribute_module(module, mesh, partition)
    assert module.first.weight is module.last.weight
    assert module.first.weight.placements == (S0,)
    check(world, module, placed_input(world, mesh), "Tied")


@distributed(world_size=2)
def test_a_tied_weight_is_not_placed_in_two_ways(world: World) -> None:
    module = make(world, "Tied")

    def partition(name: str, submodule: Any, mesh: Any) -> None:
        if name:
            _put(world.platform, submodule, "weight", mesh, S0 if name == "first" else S1)

    with pytest.raises(
        ValueError, match="'first.weight' and 'last.weight' are one parameter, but were given"
    ):
        distribute_module(module, make_mesh(world), partition)
