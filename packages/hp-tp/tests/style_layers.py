"""One layer in a style against the same one in one process: inputs, a loss, modules that say how they are cut."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from hp_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_platform.testing import World, assert_parity
from hp_tp import ModuleCuts, parallelize_module

sys.path.insert(0, str(Path(__file__).parent))
from tp_models import Maker, make_mesh, tolerance
from tp_training import backward, whole_gradients

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
