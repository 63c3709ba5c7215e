"""What ``describe`` says of a layer is what a call sends: for every pair of layouts, forward and backward, kinds and bytes."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hp_dtensor import Partial, Replicate, Shard
from hp_platform.testing import World, count_collectives, distributed
from hp_tp import (
    ColwiseParallel,
    DropoutParallel,
    ModuleCuts,
    PrepareModel,
    RowwiseParallel,
    SequenceParallel,
    describe,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parent))
from tp_models import Maker, classes, dtype_of, make_mesh
from tp_training import backward

SHAPE = (4, 8, 16)
"""Batch, places, features: they divide over 2 and 4 ranks."""
LAYOUTS = (Replicate(), Shard(0), Shard(1), Shard(-1), Partial())


def check(world: World, layer: Any, style: Any, layout: Any, what: str, ids: bool = False) -> None:
    """One call and its backward, with a plain input that lies so."""
    platform, maker = world.platform, Maker(world)
    parallelize_module(layer, make_mesh(world), style)
    shape = list(SHAPE[:2] if ids else SHAPE)
    if isinstance(layout, Shard):
        shape[layout.dim] = shape[layout.dim] // world.size
    if ids:
        x = maker.ids(SHAPE[-1], *shape)
    else:
        x = platform.set_requires_grad_(maker.tensor(*shape), True) * 1
    said = describe(layer).traffic[""].declared
    with count_collectives() as forward:
        y = layer(x)
    with count_collectives() as back:
        backward(platform, (y * y).sum())
    for side, transfers, counted in (("forward", said.forward, forward), ("backward", said.backward, back)):
        expected = Counter(transfer.kind for transfer in transfers)
        found = {kind: number for kind, number in counted.counts.items() if number}
        assert found == dict(expected), f"{what}, {side}: {', '.join(map(str, transfers))}"
        for kind in expected:
            of_kind = [transfer for transfer in transfers if transfer.kind == kind]
            if all(t.nbytes is not None or t.nbytes_per_row is not None for t in of_kind):
                nbytes = sum(
                    t.nbytes if t.nbytes is not None else math.prod(SHAPE[:2]) * t.nbytes_per_row
                    for t in of_kind
                )
                assert counted.nbytes(kind) == nbytes, f"{what}, {side}, {kind}"


def check_all(world: World, make: Callable[[], Any], style: Callable[..., Any], **options: Any) -> None:
    for given in LAYOUTS:
        for wanted in LAYOUTS:
            made = style(input_layouts=given, output_layouts=wanted, **options)
            check(world, make(), made, given, f"{type(made).__name__} from {given} to {wanted}, {options}")


@distributed(world_size=(2, 4))
def test_linear_layers_send_what_is_said_for_every_pair_of_layouts(world: World) -> None:
    def linear() -> Any:
        return Maker(world).linear(16, 8)

    check_all(world, linear, ColwiseParallel)
    check_all(world, linear, RowwiseParallel)


@distributed(world_size=2)
def test_sizes_that_are_told_at_every_call_are_said(world: World) -> None:
    def linear() -> Any:
        return Maker(world).linear(16, 8)

    check_all(world, linear, ColwiseParallel, uneven=True)
    check_all(world, linear, RowwiseParallel, uneven=True)


@distributed(world_size=2)
def test_heads_that_several_ranks_compute_are_said(world: World) -> None:
    kv = {"heads": 1, "query_heads": 4, "replicate_kv": True}
    check_all(world, lambda: Maker(world).linear(16, 8), ColwiseParallel, **kv)


@distributed(world_size=2)
def test_embeddings_send_what_is_said_for_whole_ids(world: World) -> None:
    for style in (ColwiseParallel, RowwiseParallel):
        for wanted in LAYOUTS:
            made = style(input_layouts=Replicate(), output_layouts=wanted)
            layer = Maker(world).embedding(16, 16)
            check(world, layer, made, Replicate(), f"{style.__name__} to {wanted}", ids=True)


@distributed(world_size=2)
def test_modules_with_cuts_of_their_own_send_what_is_said(world: World) -> None:
    """A scale of each feature, and one of all features: the gradient of a parameter that is whole is summed."""
    platform = world.platform

    class Scale(platform.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.each = platform.parameter(Maker(world).tensor(16))
            self.all = platform.parameter(Maker(world).tensor(1))

        def forward(self, x: Any) -> Any:
            return x * self.each * self.all

    cuts = ModuleCuts({"each": 0, "all": None}, input_is_cut=True)
    check_all(world, Scale, ColwiseParallel, cuts=cuts)
    check_all(world, Scale, RowwiseParallel, cuts=ModuleCuts({"each": 0, "all": None}))


@distributed(world_size=2)
def test_norms_on_parts_of_a_sequence_send_what_is_said(world: World) -> None:
    for given in LAYOUTS:
        for uneven in (False, True):
            for local in (True, False):
                style = SequenceParallel(
                    input_layouts=given, use_local_output=True, local=local, uneven=uneven
                )
                norm = classes(world.platform).RMSNorm(Maker(world), 16)
                check(world, norm, style, given, f"from {given}, uneven {uneven}, on pieces {local}")


@distributed(world_size=2, backends=("torch", "cuda", "npu"))
def test_norms_of_the_framework_say_bytes_too(world: World) -> None:
    for given in LAYOUTS:
        norm = Maker(world).filled(Maker(world).stock.LayerNorm((16,)))
        style = SequenceParallel(input_layouts=given, use_local_output=True)
        assert dtype_of(world) in str(world.platform.dtype_name(norm.weight.dtype))
        check(world, norm, style, given, f"from {given}")


@distributed(world_size=2)
def test_doors_of_whole_models_send_what_is_said(world: World) -> None:
    class Twice(world.platform.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return x * 2

    for layout in LAYOUTS[:-1]:
        style = PrepareModel(layouts=layout)
        layer = parallelize_module(Twice(), make_mesh(world), style)
        said = describe(layer).traffic[""].declared
        assert [t.what for t in said.forward] == ["results that are cut"]
        if isinstance(layout, Shard):
            check(world, Twice(), style, Replicate(), f"inside {layout}")
        else:
            assert said.backward == ()


@distributed(world_size=2)
def test_dropout_sends_what_is_said(world: World) -> None:
    for given in (Replicate(), Shard(1)):
        for sizes in ({}, {1: SHAPE[1]}) if isinstance(given, Shard) else ({},):
            layer = Maker(world).stock.Dropout(0.5)
            check(world, layer, DropoutParallel(input_layouts=given, sizes=sizes), given, f"{given}, {sizes}")
