"""Dropout in a tensor parallel model has the mask of one process, whatever lies where."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Shard, distribute_tensor, manual_seed, parallelize_module, random
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed
from hp_tp import ColwiseParallel, DropoutParallel, Linear2DParallel, RowwiseParallel, SequenceParallel

sys.path.insert(0, str(Path(__file__).parent))
from dropout_models import (
    BATCH,
    LENGTH,
    WIDTH,
    Apply,
    P,
    attention,
    drops_by_function,
    drops_by_layer,
    feed_forward,
    stock_dropout,
)
from tp_models import Maker, make_mesh, tolerance
from tp_training import backward, mean_square, whole_gradients


def check(world: World, build: Callable[[Apply], Any], plan: dict[str, Any], name: str) -> None:
    """Two steps of forward and backward: results, gradients and where the stream stands."""
    platform = world.platform
    reference, model = build(drops_by_function), build(drops_by_layer)
    parallelize_module(model, make_mesh(world), plan)
    found, expected = [], []
    for net, seen in ((reference, expected), (model, found)):
        manual_seed(11)
        for step in range(2):
            x = platform.set_requires_grad_(Maker(world, 50 + step).tensor(BATCH, LENGTH, WIDTH), True)
            y = net(x)
            backward(platform, mean_square(platform, y))
            y = y.full_tensor() if hasattr(y, "full_tensor") else y
            seen.append((platform.detach(y), platform.get_grad(x)))
        seen.append(whole_gradients(platform, net))
        seen.append(random.get_state())
    assert_parity(found, expected, **tolerance(world), name=name)


LOCAL = "plain pieces"
DTENSORS = "DTensors"
SEQUENCE = "a cut sequence"


@pytest.mark.parametrize("way", [LOCAL, DTENSORS, SEQUENCE])
@distributed(world_size=[1, 2, 3, 4])
def test_dropout_behind_both_layers_of_a_pair_has_the_mask_of_one_process(world: World, way: str) -> None:
    for hidden in (12, 7, 2):  # even, uneven, fewer features than ranks
        # Sizes are told for some, asked for others.
        told = {"sizes": {-1: hidden}} if hidden != 7 else {}
        plans: dict[str, dict[str, Any]] = {
            LOCAL: {
                "up": ColwiseParallel(),
                "inner": DropoutParallel(input_layouts=Shard(-1), **told),
                "down": RowwiseParallel(),
                "outer": DropoutParallel(),
            },
            DTENSORS: {
                "up": ColwiseParallel(use_local_output=False),
                "down": RowwiseParallel(use_local_output=False),
            },
            SEQUENCE: {
                "up": ColwiseParallel(),
                "inner": DropoutParallel(input_layouts=Shard(-1), **told),
                "down": RowwiseParallel(output_layouts=Shard(1)),
                "outer": SequenceParallel(),
            },
        }
        check(world, lambda drop: feed_forward(world, hidden, drop), plans[way], f"{way}, hidden {hidden}")  # noqa: B023


@pytest.mark.parametrize("way", [LOCAL, DTENSORS])
@distributed(world_size=[1, 2, 3])
def test_dropout_of_attention_probabilities_has_the_mask_of_one_process(world: World, way: str) -> None:
    heads = 6
    is_local = way == LOCAL
    plan: dict[str, Any] = {
        "[qkv]": ColwiseParallel(heads=heads, use_local_output=is_local),
        "o": RowwiseParallel(heads=heads),
    }
    if is_local:
        plan["drop"] = DropoutParallel(input_layouts=Shard(1), sizes={1: heads})
    check(world, lambda drop: attention(world, heads, drop), plan, way)


@distributed(world_size=2)
def test_without_a_style_plain_pieces_would_get_one_mask_for_all(world: World) -> None:
    """What the style is for: a layer that is told nothing takes the piece for the whole."""
    mesh, maker = make_mesh(world), Maker(world)
    whole = maker.tensor(4, 8) * 0.0 + 1.0
    piece = distribute_tensor(whole, mesh, [Shard(1)]).to_local()
    layer = parallelize_module(stock_dropout(world), mesh, DropoutParallel(input_layouts=Shard(1)))
    manual_seed(3)
    expected = random.dropout(whole, P)
    manual_seed(3)
    found = layer(piece)
    assert_parity(found, distribute_tensor(expected, mesh, [Shard(1)]).to_local(), exact=True)
    manual_seed(3)
    alone = parallelize_module(stock_dropout(world), mesh, DropoutParallel())(piece)
    first = distribute_tensor(expected, mesh, [Shard(1)]).full_tensor()
    manual_seed(3)
    assert_parity(alone, random.dropout(piece, P), exact=True)
    assert world.platform.to_numpy(first).sum() != 2 * world.platform.to_numpy(alone).sum()


@distributed(world_size=[2, 4])
def test_dropout_between_layers_over_two_mesh_dims(world: World) -> None:
    platform, hidden, rows = world.platform, 7, 5
    mesh = init_device_mesh(world.device_type, (2, world.size // 2), mesh_dim_names=("tp_r", "tp_c"))
    cut = (Shard(0), Shard(1))
    x = Maker(world, 50).tensor(rows, WIDTH)
    reference, model = (
        feed_forward(world, hidden, drops_by_function),
        feed_forward(world, hidden, drops_by_layer),
    )
    told = {0: rows, 1: hidden}
    parallelize_module(
        model,
        mesh,
        {
            "up": Linear2DParallel(),
            "inner": DropoutParallel(input_layouts=cut, sizes=told),
            "down": Linear2DParallel(use_local_output=False),
        },
    )
    manual_seed(11)
    expected = reference(x)
    backward(platform, mean_square(platform, expected))
    manual_seed(11)
    found = model(distribute_tensor(x, mesh, cut).to_local())
    backward(platform, mean_square(platform, found))
    assert_parity(platform.detach(found.full_tensor()), platform.detach(expected), **tolerance(world))
    assert_parity(whole_gradients(platform, model), whole_gradients(platform, reference), **tolerance(world))


@distributed(world_size=2)
def test_told_sizes_cost_no_communication_and_others_one_gather_of_integers(world: World) -> None:
    platform, mesh, maker = world.platform, make_mesh(world), Maker(world)
    piece = distribute_tensor(maker.tensor(3, 5), mesh, [Shard(1)]).to_local()
    for style, gathers in (
        (DropoutParallel(input_layouts=Shard(-1), sizes={-1: 5}), 0),
        (DropoutParallel(), 0),
        (DropoutParallel(input_layouts=Shard(-1)), 1),
    ):
        layer = parallelize_module(stock_dropout(world), mesh, style)
        own = platform.set_requires_grad_(platform.clone(piece), True)
        with count_collectives() as counted:
            backward(platform, mean_square(platform, layer(own)))
        counted.assert_counts(all_gather=gathers)
        assert counted.nbytes() == gathers * world.size * 2 * 8  # two dims as int64 from each rank


@distributed(world_size=2)
def test_mode_and_probability_are_read_at_the_call_and_results_may_be_sharded(world: World) -> None:
    platform, mesh, maker = world.platform, make_mesh(world), Maker(world)
    x = maker.tensor(4, 6)
    piece = distribute_tensor(x, mesh, [Shard(0)]).to_local()
    style = DropoutParallel(input_layouts=Shard(0), sizes={0: 4}, use_local_output=False)
    layer = parallelize_module(stock_dropout(world), mesh, style)
    layer.p = 0.9
    manual_seed(3)
    expected = random.dropout(x, 0.9)
    manual_seed(3)
    found = layer(piece)
    assert found.placements == (Shard(0),)
    assert_parity(found.full_tensor(), expected, exact=True)
    assert layer(found).placements == (Shard(0),)  # a DTensor knows itself how it lies
    platform.set_training(layer, False)
    before = random.get_state()
    assert_parity(layer(piece).full_tensor(), x, exact=True)
    assert random.get_state() == before
