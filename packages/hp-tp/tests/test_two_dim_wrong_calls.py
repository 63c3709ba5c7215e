"""Wrong uses of Linear2DParallel are refused at once, with what was given and what to change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hp_dtensor import Replicate, Shard, distribute_tensor, parallelize_module
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed
from hp_tp import Linear2DParallel

sys.path.insert(0, str(Path(__file__).parent))
from two_dim_layers import mesh_of, numbers, stock_linear


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"row_dim": -1}, "row_dim is the dim .* any but the last, got -1"),
        ({"row_dim": 1.0}, "row_dim is the dim .* got 1.0"),
        ({"num_panels": 0}, "num_panels is a number of panels, 1 or more, or None, got 0"),
        ({"num_panels": True}, "num_panels is a number of panels, 1 or more, or None, got True"),
        ({"input_layouts": Shard(0)}, "input_layouts takes one placement per mesh dim, .* got Shard"),
        ({"output_layouts": (Shard(0),)}, "output_layouts takes one placement per mesh dim"),
        ({"output_layouts": (Shard(0), "tp_c")}, "output_layouts takes one placement per mesh dim"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Linear2DParallel(**arguments)


@distributed(world_size=2)
def test_what_it_cannot_lay_out_is_refused(world: World) -> None:
    platform, style, mesh = world.platform, Linear2DParallel(), mesh_of(world, (1, 2))

    class Model(platform.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = stock_linear(world, 4, 6)

        def forward(self, x: Any) -> Any:
            return self.head(x)

    with pytest.raises(ValueError, match="takes a linear layer, got Model: name the linear layers in it"):
        parallelize_module(Model(), mesh, style)

    class Scaled(type(stock_linear(world, 4, 6))):
        def forward(self, x: Any) -> Any:
            return 2.0 * x

        construct = forward

    with pytest.raises(ValueError, match="Scaled has a forward of its own: let it hold a linear layer"):
        parallelize_module(Scaled(4, 6), mesh, style)

    line = init_device_mesh(world.device_type, (2,), mesh_dim_names=("tp",))
    with pytest.raises(ValueError, match="Linear2DParallel takes a mesh of 2 dims"):
        parallelize_module(stock_linear(world, 4, 6), line, style)
    with pytest.raises(ValueError, match=r"takes a mesh of 2 dims, got .*slice it by name"):
        style.apply(stock_linear(world, 4, 6), line)
    with pytest.raises(ValueError, match="device_mesh must be a hp_platform.DeviceMesh"):
        style.apply(stock_linear(world, 4, 6), (1, 2))

    done = parallelize_module(stock_linear(world, 4, 6), mesh, style)
    with pytest.raises(ValueError, match="weight of .* is a DTensor already, .*give a layer one style"):
        parallelize_module(done, mesh, style)

    layer = stock_linear(world, 4, 6)
    layer.extra = platform.parameter(numbers(world, 3))
    with pytest.raises(ValueError, match="a layer with weight and perhaps bias, .* has bias, extra, weight"):
        parallelize_module(layer, mesh, style)


@distributed(world_size=2)
def test_inputs_that_do_not_fit_are_refused(world: World) -> None:
    platform, mesh = world.platform, mesh_of(world, (1, 2))
    layer = parallelize_module(stock_linear(world, 4, 6), mesh, Linear2DParallel())
    piece = numbers(world, 3, 2)
    other = init_device_mesh(world.device_type, (2, 1), mesh_dim_names=("tp_r", "tp_c"))
    whole = (Replicate(), Replicate())
    wrong: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: layer(numbers(world, 3, 4)),
            rf"Linear\(4, 6\) has 4 columns on this rank, but chunk {world.rank} of in_features 4 over 2 ranks has 2: "
            r"give the input's piece, or say in input_layouts",
        ),
        (lambda: layer(numbers(world, 2)), "got a tensor of 1 dims, of which row_dim=0 is to be cut"),
        (lambda: layer(platform.cast(piece, "float16")), "input of .* is float16, its weight float"),
        (lambda: layer([1.0, 2.0]), r"Linear\(4, 6\) takes a tensor, got list"),
        (
            lambda: layer(distribute_tensor(piece, other, whole)),
            "lies on .* but the style was applied on",
        ),
        (
            lambda: layer(distribute_tensor(piece, mesh, whole)),
            r"has the global shape \(3, 2\): its last dim must be in_features 4",
        ),
        (lambda: layer(piece, piece), r"Linear\(4, 6\) takes one tensor, got 2 arguments"),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()
    assert tuple(layer(piece).shape) == (3, 3)

    deep = parallelize_module(stock_linear(world, 4, 6), mesh, Linear2DParallel(row_dim=2))
    with pytest.raises(ValueError, match="got a tensor of 3 dims, of which row_dim=2 is to be cut"):
        deep(numbers(world, 3, 3, 2))
