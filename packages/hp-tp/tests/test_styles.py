"""Each style on one layer: every way in and out, uneven sizes, and layers of other kinds; against one process."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_platform.testing import World, assert_parity, count_collectives, distributed
from hp_tp import ColwiseParallel, ModuleCuts, RowwiseParallel, SequenceParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parent))
from tp_models import Maker, backward, local, make_mesh, tolerance, whole_gradients

LENGTH = 12
PLACES = {"whole": Replicate(), "cut": Shard(1), "features": Shard(-1), "sum": Partial()}


def input_of(world: World, features: int, length: int = LENGTH) -> Any:
    """``(2, length, features)``, that requires grad."""
    return world.platform.set_requires_grad_(Maker(world, 3).tensor(2, length, features), True)


def loss_of(world: World, y: Any) -> Any:
    """A number that tells all elements apart."""
    values = np.arange(int(np.prod(tuple(y.shape)))).reshape(tuple(y.shape)) % 7 - 3.0
    weights = world.platform.tensor(values, Maker(world).dtype, world.device)
    if isinstance(y, DTensor):
        weights = distribute_tensor(weights, y.device_mesh)
    return (y * weights).sum()


def whole(mesh: Any, y: Any, place: Any, shape: tuple[int, ...]) -> Any:
    """What came out, as a DTensor: it is one, or a piece that lies so."""
    return y if isinstance(y, DTensor) else DTensor.from_local(y, mesh, [place], shape=shape)


def check(
    world: World,
    build: Callable[[Maker], Any],
    style: Any,
    given: str = "whole",
    *,
    is_plain: bool = True,
    out: Any = None,
    length: int = LENGTH,
    features: int = 6,
    name: str = "",
) -> Any:
    """Output, gradient of the input and gradients of the parameters are those of one process. Returns the module."""
    platform, limits, mesh = world.platform, tolerance(world), make_mesh(world)
    reference, module = build(Maker(world)), parallelize_module(build(Maker(world)), mesh, style)
    one, ours = input_of(world, features, length), input_of(world, features, length)
    x: Any = distribute_tensor(ours, mesh, [Replicate()]).redistribute(placements=[PLACES[given]])
    if is_plain:
        x = platform.set_requires_grad_(platform.clone(platform.detach(x.to_local())), True)
    expected, y = reference(one), module(x)
    y = whole(mesh, y, Replicate() if out is None else out, tuple(expected.shape))
    assert_parity(y, expected, **limits, name=f"{name} output")
    backward(platform, loss_of(world, expected))
    backward(platform, loss_of(world, y))
    assert_parity(
        whole_gradients(platform, module),
        whole_gradients(platform, reference),
        **limits,
        name=f"{name} parameters",
    )
    if is_plain and given in ("whole", "cut", "features"):
        gradient = DTensor.from_local(platform.get_grad(x), mesh, [PLACES[given]], shape=tuple(one.shape))
        assert_parity(gradient, platform.get_grad(one), **limits, name=f"{name} input")
    return module


# ------------------------------------------------------------------------------------------------------------ in and out
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


# ----------------------------------------------------------------------------------------------------------- other layers
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


@cache
def classes(platform: Any) -> SimpleNamespace:
    """Modules that say how they are cut."""

    class Gate(platform.Module):
        """``silu(x @ weight.T + bias) * scale * factor``."""

        def __init__(self, maker: Maker) -> None:
            super().__init__()
            self.weight, self.bias = (
                platform.parameter(maker.tensor(7, 6)),
                platform.parameter(maker.tensor(7)),
            )
            self.scale = platform.parameter(maker.tensor(7))
            self.factor = platform.parameter(maker.tensor(1))

        def forward(self, x: Any) -> Any:
            return platform.silu(platform.linear(x, self.weight, self.bias)) * self.scale * self.factor

        def tensor_parallel_cuts(self, style: str) -> ModuleCuts:
            assert style == "colwise"
            return ModuleCuts({"weight": 0, "bias": 0, "scale": -1, "factor": None})

    class Scale(platform.Module):
        """Each feature for itself."""

        def __init__(self, maker: Maker) -> None:
            super().__init__()
            self.weight = platform.parameter(maker.tensor(6))

        def forward(self, x: Any) -> Any:
            return platform.silu(x) * self.weight

        def tensor_parallel_cuts(self, style: str) -> ModuleCuts:
            return ModuleCuts({"weight": 0}, input_is_cut=True)

    class Down(platform.Module):
        """``(x * factor) @ weight + shift``, with a weight that lies the other way."""

        def __init__(self, maker: Maker) -> None:
            super().__init__()
            self.weight, self.shift = (
                platform.parameter(maker.tensor(6, 5)),
                platform.parameter(maker.tensor(5)),
            )
            self.factor = platform.parameter(maker.tensor(1))

        def forward(self, x: Any) -> Any:
            y = platform.matmul(x * self.factor, self.weight)
            return y if self.shift is None else y + self.shift

        def tensor_parallel_cuts(self, style: str) -> ModuleCuts:
            assert style == "rowwise"
            return ModuleCuts({"weight": 0, "shift": None, "factor": None}, added_after="shift")

    class Norm(platform.Module):
        def __init__(self, maker: Maker) -> None:
            super().__init__()
            self.weight, self.bias = platform.parameter(maker.tensor(6)), platform.parameter(maker.tensor(6))

        def forward(self, x: Any) -> Any:
            return x * platform.rsqrt(platform.mean(x * x, -1, True) + 2.0**-20) * self.weight + self.bias

    return SimpleNamespace(Gate=Gate, Scale=Scale, Down=Down, Norm=Norm)


@distributed(world_size=(1, 2, 3))
def test_a_module_says_how_it_is_cut(world: World) -> None:
    own = classes(world.platform)
    check(world, own.Gate, ColwiseParallel(), out=Shard(-1), name="Gate")
    check(
        world, own.Gate, ColwiseParallel(input_layouts=Shard(1)), "cut", out=Shard(-1), name="Gate of a piece"
    )
    check(world, own.Scale, ColwiseParallel(), "features", out=Shard(-1), name="Scale")
    check(world, own.Down, RowwiseParallel(), "features", name="Down")
    check(
        world, own.Down, RowwiseParallel(output_layouts=Shard(1)), "features", out=Shard(1), name="Down, cut"
    )


@distributed(world_size=2)
def test_a_style_is_told_how_a_module_is_cut_and_may_let_it_run_on_dtensors(world: World) -> None:
    own = classes(world.platform)
    on_dtensors = ModuleCuts({"weight": 0, "bias": 0, "scale": 0, "factor": None}, on_dtensors=True)
    check(world, own.Gate, ColwiseParallel(cuts=on_dtensors), out=Shard(-1), name="Gate")
    # The module's own word is not asked.
    check(
        world,
        own.Down,
        RowwiseParallel(cuts=ModuleCuts({"weight": 0, "shift": None, "factor": None}, on_dtensors=True)),
        "features",
        name="Down",
    )


# ------------------------------------------------------------------------------------------------------ fused projections
@distributed(world_size=(1, 2, 3))
def test_a_fused_projection_is_cut_part_by_part(world: World) -> None:
    """The pieces of q, k and v come out one after the other; gradients of the parts are those of the fused weight's rows."""
    platform, limits, mesh = world.platform, tolerance(world), make_mesh(world)
    sizes = {"q": 12, "k": 6, "v": 6}
    for given, parts in (("whole", sizes), ("cut", list(sizes.values()))):
        reference = Maker(world).linear(6, 24)
        heads = {"q": 6, "k": 6, "v": 6} if parts is sizes else None
        style = ColwiseParallel(parts=parts, heads=heads, input_layouts=PLACES[given])
        layer = parallelize_module(Maker(world).linear(6, 24), mesh, style)
        x = input_of(world, 6)
        piece = distribute_tensor(platform.detach(x), mesh, [PLACES[given]]).to_local()
        y = layer(piece)
        own = [size // world.size for size in sizes.values()]
        expected = reference(x)
        total = None
        for part, whole_part in zip(
            platform.split(y, own, 2), platform.split(expected, list(sizes.values()), 2), strict=True
        ):
            joined = DTensor.from_local(part, mesh, [Shard(-1)], shape=tuple(whole_part.shape))
            assert_parity(joined, whole_part, **limits, name="part")
            loss = loss_of(world, joined)
            total = loss if total is None else total + loss
        backward(platform, total)
        losses = [loss_of(world, part) for part in platform.split(expected, list(sizes.values()), 2)]
        backward(platform, losses[0] + losses[1] + losses[2])
        names = list(sizes) if parts is sizes else ["0", "1", "2"]
        for name in ("weight", "bias"):
            rows = platform.split(platform.get_grad(getattr(reference, name)), list(sizes.values()))
            for part_name, gradient in zip(names, rows, strict=True):
                ours = getattr(layer, f"{name}_{part_name}")
                assert ours.placements == (Shard(0),)
                assert_parity(ours.grad, gradient, **limits, name=f"{name}_{part_name}")
        assert {n for n, _ in platform.named_parameters(layer)} == {
            f"{name}_{part}" for name in ("weight", "bias") for part in names
        }


@distributed(world_size=4)
def test_parts_of_a_fused_projection_may_be_heads_that_several_ranks_compute(world: World) -> None:
    """12 query heads share 3 of keys and values, 4 each: the queries of every rank find theirs, in order."""
    platform, mesh, size = world.platform, make_mesh(world), 2
    parts = {"q": 12 * size, "k": 3 * size, "v": 3 * size}
    style = ColwiseParallel(parts=parts, heads={"q": 12, "k": 3, "v": 3}, query_heads=12, replicate_kv=True)
    reference, layer = Maker(world).linear(6, 36), parallelize_module(Maker(world).linear(6, 36), mesh, style)
    x = input_of(world, 6)
    q, k, v = platform.split(reference(x), list(parts.values()), 2)
    queries = range(12 // world.size * world.rank, 12 // world.size * (world.rank + 1))
    # 6 queries share two by two: 0, 0, 0, 0, 1, 1 is 0, 0, 1. 3 queries find one each.
    heads = [i // 4 for i in queries][:: math.gcd(len(queries), 4)]

    def columns(x: Any, heads: Any) -> Any:
        return platform.to_numpy(x)[..., [size * head + i for head in heads for i in range(size)]]

    expected = np.concatenate([columns(q, queries), columns(k, heads), columns(v, heads)], -1)
    np.testing.assert_allclose(platform.to_numpy(layer(x)), expected, rtol=0, atol=tolerance(world)["atol"])
    assert layer.weight_k.placements == (Replicate(),)


# ---------------------------------------------------------------------------------------------------------------- sequences
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


# ---------------------------------------------------------------------------------------------------------- communication
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


# ------------------------------------------------------------------------------------------------------------ parameters
@distributed(world_size=2)
def test_values_are_those_of_the_first_rank_or_of_every_rank(world: World) -> None:
    platform, mesh = world.platform, make_mesh(world)
    for source, expected in ((0, 0.0), (1, 1.0), (None, float(world.rank))):
        layer = Maker(world).linear(4, 6)
        platform.copy_(
            layer.weight, platform.full((6, 4), float(world.rank), layer.weight.dtype, world.device)
        )
        parallelize_module(layer, mesh, ColwiseParallel(), src_data_rank=source)
        assert (platform.to_numpy(local(layer.weight)) == expected).all()


@distributed(world_size=2)
def test_frozen_parameters_stay_frozen(world: World) -> None:
    platform, mesh = world.platform, make_mesh(world)
    layer = Maker(world).linear(4, 6)
    platform.set_requires_grad_(layer.weight, False)
    parallelize_module(layer, mesh, ColwiseParallel(parts=[4, 2]))
    asked = {name: platform.requires_grad(p) for name, p in platform.named_parameters(layer)}
    assert asked == {"weight_0": False, "weight_1": False, "bias_0": True, "bias_1": True}


@distributed(world_size=2, backends=("torch", "cuda", "npu"))
def test_a_module_in_a_style_can_be_copied(world: World) -> None:
    platform, mesh = world.platform, make_mesh(world)
    layer = parallelize_module(Maker(world).linear(6, 6), mesh, ColwiseParallel())
    twin = copy.deepcopy(layer)
    assert type(twin) is type(layer)
    assert type(twin).__name__ == "Linear"
    x = platform.detach(input_of(world, 6))
    assert (platform.to_numpy(twin(x)) == platform.to_numpy(layer(x))).all()
    platform.copy_(local(twin.weight), platform.zeros_like(platform.detach(local(twin.weight))))
    assert abs(platform.to_numpy(layer(x)) - platform.to_numpy(twin(x))).max() > 0.1


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
