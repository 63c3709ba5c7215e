"""Each style on one layer: every way in and out, uneven sizes, gradients of every order; against one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Partial, Replicate, Shard, distribute_tensor
from hp_platform.testing import World, assert_parity, count_collectives, distributed
from hp_tp import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parent))
from style_layers import PLACES, check, classes, input_of, loss_of, whole
from tp_models import Maker, make_mesh, tolerance
from tp_training import backward, local


@distributed(world_size=(1, 2, 3))
def test_colwise_takes_and_gives_every_layout(world: World) -> None:
    for rows in (5, 1):
        for given in ("whole", "cut", "sum"):
            for out in (Shard(-1), Replicate(), Shard(1)):
                for is_plain, use_local in ((True, True), (False, False)):
                    if is_plain and given == "sum":
                        continue  # the gradient of a plain summand is no single thing to compare
                    style = ColwiseParallel(
                        input_layouts=PLACES[given], output_layouts=out, use_local_output=use_local
                    )
                    check(
                        world,
                        lambda maker, rows=rows: maker.linear(6, rows),
                        style,
                        given,
                        is_plain=is_plain,
                        out=out,
                        name=f"{rows} {given} {out} {is_plain}",
                    )


@distributed(world_size=(1, 2, 3))
def test_rowwise_takes_and_gives_every_layout(world: World) -> None:
    for columns in (5, 1):
        for given in ("features", "whole", "cut"):
            for out in (Replicate(), Shard(1), Shard(-1)):
                for is_plain, use_local in ((True, True), (False, False)):
                    style = RowwiseParallel(
                        input_layouts=PLACES[given], output_layouts=out, use_local_output=use_local
                    )
                    check(
                        world,
                        lambda maker, columns=columns: maker.linear(columns, 6),
                        style,
                        given,
                        is_plain=is_plain,
                        out=out,
                        features=columns,
                        name=f"{columns} {given} {out} {is_plain}",
                    )


@distributed(world_size=(2, 3))
def test_a_summand_is_a_result_too(world: World) -> None:
    style = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
    check(world, lambda maker: maker.linear(6, 4), style, "features", is_plain=False)


@distributed(world_size=(2, 3))
def test_the_bias_is_added_once_and_exactly(world: World) -> None:
    """0.1 is no sum of thirds of itself, in floating numbers."""
    platform = world.platform
    for out in (Replicate(), Shard(1)):
        layer = Maker(world).linear(6, 4)
        platform.copy_(layer.weight, platform.zeros_like(platform.detach(layer.weight)))
        platform.copy_(layer.bias, platform.full((4,), 0.1, layer.bias.dtype, world.device))
        parallelize_module(layer, make_mesh(world), RowwiseParallel(output_layouts=out))
        mesh = make_mesh(world)
        x = distribute_tensor(platform.detach(input_of(world, 6)), mesh, [Shard(-1)])
        y = layer(x)
        assert (platform.to_numpy(y) == platform.to_numpy(local(layer.bias))).all()


@distributed(world_size=(2, 4))
def test_pieces_of_several_sizes_go_out_plain_only_if_that_is_wished(world: World) -> None:
    """And then come in as such, for one gather of the sizes."""
    platform, mesh = world.platform, make_mesh(world)
    x = input_of(world, 6, length=5)
    for style in (RowwiseParallel(output_layouts=Shard(1)), ColwiseParallel(output_layouts=Shard(1))):
        layer = parallelize_module(Maker(world).linear(6, 6), mesh, style)
        piece = (
            distribute_tensor(platform.detach(x), mesh, [Shard(-1)]) if "Row" in type(style).__name__ else x
        )
        with pytest.raises(
            ValueError, match=rf"dim 1 of size 5 does not divide over {world.size} ranks.*uneven=True"
        ):
            layer(piece)
    check(
        world,
        lambda maker: maker.linear(6, 6),
        ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(1), uneven=True),
        "cut",
        out=Shard(1),
        length=5,
    )
    check(
        world,
        lambda maker: maker.linear(6, 6),
        RowwiseParallel(output_layouts=Shard(1), uneven=True),
        "whole",
        is_plain=False,
        out=Shard(1),
        length=5,
    )


@distributed(world_size=(1, 2, 4))
def test_embeddings_by_rows_and_by_columns(world: World) -> None:
    """50 rows on 4 ranks are 13, 13, 13 and 11; 2 rows leave ranks without any; 3 columns too."""
    platform, limits, mesh = world.platform, tolerance(world), make_mesh(world)
    for vocabulary, width in ((50, 3), (2, 4)):
        ids = Maker(world, 5).ids(vocabulary, 2, 4)
        for style, place in (
            (RowwiseParallel(), Replicate()),
            (RowwiseParallel(output_layouts=Shard(1)), Shard(1)),
            (ColwiseParallel(), Shard(-1)),
        ):
            reference = Maker(world).embedding(vocabulary, width)
            layer = parallelize_module(Maker(world).embedding(vocabulary, width), mesh, style)
            expected, y = reference(ids), layer(ids)
            y = whole(mesh, y, place, tuple(expected.shape))
            assert_parity(y, expected, **limits, name="rows")
            backward(platform, loss_of(world, expected))
            backward(platform, loss_of(world, y))
            assert_parity(layer.weight.grad, platform.get_grad(reference.weight), **limits, name="table")


@distributed(world_size=(1, 2, 3))
def test_sequence_parallel_runs_norms_on_parts_and_adds_up_gradients(world: World) -> None:
    own = classes(world.platform)
    for local_forward in (None, True):
        for use_local in (False, True):
            style = SequenceParallel(local=local_forward, use_local_output=use_local)
            for is_plain in (True, False):
                check(
                    world,
                    own.Norm,
                    style,
                    "cut",
                    is_plain=is_plain,
                    out=Shard(1),
                    name=f"{local_forward} {use_local} {is_plain}",
                )
    check(world, own.Norm, SequenceParallel(), "whole", is_plain=False, length=5, name="uneven")
    check(
        world,
        own.Norm,
        SequenceParallel(uneven=True, use_local_output=True, local=True),
        "cut",
        out=Shard(1),
        length=5,
        name="uneven, plain",
    )


@distributed(world_size=2, backends=("torch", "cuda", "npu"))
def test_the_layer_norm_of_the_framework_runs_on_pieces(world: World) -> None:
    def build(maker: Maker) -> Any:
        return maker.filled(maker.stock.LayerNorm(6))

    for use_local in (False, True):
        style = SequenceParallel(use_local_output=use_local)
        module = check(world, build, style, "cut", out=Shard(1))
        x = input_of(world, 6)
        piece = distribute_tensor(world.platform.detach(x), make_mesh(world), [Shard(1)]).to_local()
        y = module(piece)
        with count_collectives() as counted:
            backward(world.platform, loss_of(world, y))
        counted.assert_counts(all_reduce=2)


@distributed(world_size=2, backends=("torch", "cuda"))
def test_second_derivatives_pass_the_doors(world: World) -> None:
    platform, mesh = world.platform, make_mesh(world)

    def squared_gradient(first: Any, second: Any) -> Any:
        x = input_of(world, 6)
        y = second(platform.silu(first(x)))
        (gradient,) = platform.grad([loss_of(world, y * y)], [x], create_graph=True)
        platform.backward([loss_of(world, gradient * gradient)])
        return gradient

    layers = [(Maker(world, 1).linear(6, 5), Maker(world, 2).linear(5, 4)) for _ in range(2)]
    parallelize_module(layers[1][0], mesh, ColwiseParallel())
    parallelize_module(layers[1][1], mesh, RowwiseParallel())
    expected, found = (squared_gradient(*pair) for pair in layers)
    # Third powers of sums of some ten products.
    assert_parity(found, expected, rtol=1e-11, atol=1e-11, name="gradient")
    for one, ours in zip(layers[0], layers[1], strict=True):
        for name in ("weight", "bias"):
            theirs = platform.get_grad(getattr(one, name))
            assert_parity(getattr(ours, name).grad, theirs, rtol=1e-10, atol=1e-10, name=name)
