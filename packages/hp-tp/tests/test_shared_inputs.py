"""What is done with one tensor for several layers is done once, and only where that is right."""

from __future__ import annotations

import sys
from pathlib import Path

from hp_dtensor import DTensor, Shard, distribute_tensor
from hp_platform.testing import World, assert_parity, count_collectives, distributed
from hp_tp import ColwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parent))
from style_layers import PLACES, input_of
from tp_models import Maker, make_mesh, tolerance


@distributed(world_size=(2, 3))
def test_layers_that_get_one_tensor_reduce_and_gather_it_once(world: World) -> None:
    """A tensor that was computed, a leaf, a DTensor; whole or a piece; also a second time."""
    platform, mesh = world.platform, make_mesh(world)
    for given in ("whole", "cut"):
        layers = [
            parallelize_module(Maker(world).linear(6, 6), mesh, ColwiseParallel(input_layouts=PLACES[given]))
            for _ in range(3)
        ]
        piece = platform.clone(
            distribute_tensor(platform.detach(input_of(world, 6)), mesh, [PLACES[given]]).to_local()
        )
        leaf = platform.set_requires_grad_(piece, True)
        computed = leaf * 1
        inputs = [computed, DTensor.from_local(leaf * 1, mesh, [PLACES[given]])]
        if platform.supports("version_counter"):
            inputs.append(leaf)  # elsewhere a leaf's are not kept: see [Note: kept with the tensor]
        for x in inputs:
            for _ in range(2):
                with count_collectives() as forward:
                    y = sum(layer(x).sum() for layer in layers)
                forward.assert_counts(all_gather=0 if given == "whole" else 1)
                with count_collectives() as back:
                    platform.backward([y], retain_graph=True)
                kind = "all_reduce" if given == "whole" else "reduce_scatter"
                back.assert_counts(**{kind: 1})


@distributed(world_size=2, backends=("torch", "cuda", "npu"))
def test_what_was_written_between_two_layers_counts(world: World) -> None:
    platform, mesh = world.platform, make_mesh(world)
    layer = parallelize_module(Maker(world).linear(6, 6), mesh, ColwiseParallel(input_layouts=Shard(1)))
    piece = platform.detach(input_of(world, 6, length=4))
    x = piece * platform.set_requires_grad_(platform.full((1,), 1.0, piece.dtype, world.device), True)
    before = platform.to_numpy(layer(x))
    with platform.no_grad():
        platform.add_(x, 1.0)
    assert abs(platform.to_numpy(layer(x)) - before).max() > 0.1


@distributed(world_size=2)
def test_where_no_gradient_is_recorded_nothing_is_kept_and_nothing_sent_back(world: World) -> None:
    platform, mesh = world.platform, make_mesh(world)
    layer = parallelize_module(Maker(world).linear(6, 6), mesh, ColwiseParallel())
    x = input_of(world, 6)
    with platform.no_grad(), count_collectives() as counted:
        y = layer(x)
    counted.assert_counts()
    assert not platform.requires_grad(y)
    assert not hasattr(x, "_hp_tp_shared")


@distributed(world_size=2, backends=("torch", "cuda", "npu"))
def test_a_piece_is_gathered_once_also_where_no_gradient_is_recorded(world: World) -> None:
    platform, mesh = world.platform, make_mesh(world)
    layers = [
        parallelize_module(Maker(world, seed).linear(6, 6), mesh, ColwiseParallel(input_layouts=Shard(1)))
        for seed in range(3)
    ]
    x = input_of(world, 6)
    piece = distribute_tensor(platform.detach(x), mesh, [Shard(1)]).to_local()
    with platform.no_grad(), count_collectives() as counted:
        found = [layer(piece) for layer in layers]
    counted.assert_counts(all_gather=1)
    for seed, y in enumerate(found):
        expected = Maker(world, seed).linear(6, 6)(x)
        whole_y = DTensor.from_local(y, mesh, [Shard(-1)], shape=tuple(expected.shape))
        assert_parity(whole_y, expected, **tolerance(world), name=str(seed))
