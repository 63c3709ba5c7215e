"""Llama-like models, written once on the platform with the framework's own layers."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from hp_dtensor import DTensor
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World
from hp_tp import (
    ModuleCuts,
)

BATCH = 2
STOCK = {"torch": "torch.nn", "mindspore": "mindspore.mint.nn"}
"""Where a framework keeps its layers."""


@dataclass(frozen=True)
class Config:
    """Sizes of a model. ``head_dim`` is even, for the rotation."""

    heads: int = 12
    kv_heads: int = 6
    head_dim: int = 2
    hidden: int = 12
    vocabulary: int = 50
    layers: int = 2
    length: int = 12
    tied: bool = False
    bias: bool = True

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def dtype_of(world: World) -> str:
    """The widest floating dtype that can be reduced: HCCL has no float64."""
    return "float64" if world.platform.supports("reduce_float64", world.device_type) else "float32"


def tolerance(world: World) -> dict[str, float]:
    """Numbers of the order of 1, in sums of some hundred products: some hundred roundings of 1e-16, or of 6e-8."""
    return {"rtol": 0.0, "atol": 1e-12 if dtype_of(world) == "float64" else 1e-4}


def make_mesh(world: World) -> DeviceMesh:
    return init_device_mesh(world.device_type, (world.size,), mesh_dim_names=("tp",))


class Maker:
    """Makes layers of one dtype on one device; the same numbers at every call."""

    def __init__(self, world: World, seed: int = 7) -> None:
        self.platform = world.platform
        self.device = world.device
        self.dtype = dtype_of(world)
        self.random = np.random.default_rng(seed)
        self.stock = importlib.import_module(STOCK[world.platform.platform_type.value])

    def tensor(self, *shape: int) -> Any:
        return self.platform.tensor(self.random.uniform(-0.5, 0.5, shape), self.dtype, self.device)

    def ids(self, most: int, *shape: int) -> Any:
        return self.platform.tensor(self.random.integers(0, most, shape), "int64", self.device)

    def filled(self, layer: Any) -> Any:
        """The layer with numbers of this maker, in its dtype."""
        for name, parameter in list(self.platform.named_parameters(layer, recurse=False)):
            self.platform.set_parameter(layer, name, self.platform.parameter(self.tensor(*parameter.shape)))
        return layer

    def linear(self, columns: int, rows: int, bias: bool = True) -> Any:
        """The framework's ``Linear(columns, rows)``."""
        return self.filled(self.stock.Linear(columns, rows, bias=bias))

    def embedding(self, vocabulary: int, width: int) -> Any:
        return self.filled(_embedding_class(self.platform, self.stock)(vocabulary, width))


@cache
def _embedding_class(platform: Any, stock: Any) -> type:
    """The framework's Embedding. MindSpore's has no kernel on CPU for plain tensors, but for DTensors."""
    if not hasattr(stock.Embedding, "construct"):
        return stock.Embedding

    class Embedding(stock.Embedding):  # type: ignore[misc, name-defined]
        def construct(self, ids: Any) -> Any:
            if isinstance(ids, DTensor) or isinstance(self.weight, DTensor):
                return super().construct(ids)
            return platform.embedding(ids, self.weight)

    return Embedding


@cache
def classes(platform: Any) -> SimpleNamespace:
    """The modules, which derive from the framework's class."""

    class Table(platform.Module):
        """An embedding that says how it is cut."""

        def __init__(self, maker: Maker, vocabulary: int, width: int) -> None:
            super().__init__()
            self.weight = platform.parameter(maker.tensor(vocabulary, width))

        def forward(self, ids: Any) -> Any:
            return platform.embedding(ids, self.weight)

        def tensor_parallel_cuts(self, style: str) -> ModuleCuts:
            return ModuleCuts({"weight": 0 if style == "rowwise" else 1}, on_dtensors=True)

    class RMSNorm(platform.Module):
        def __init__(self, maker: Maker, width: int) -> None:
            super().__init__()
            self.weight = platform.parameter(maker.tensor(width))

        def forward(self, x: Any) -> Any:
            return x * platform.rsqrt(platform.mean(x * x, -1, True) + 2.0**-20) * self.weight

    class Attention(platform.Module):
        def __init__(self, maker: Maker, config: Config) -> None:
            super().__init__()
            self.head_dim = config.head_dim
            own, bias = config.kv_heads * config.head_dim, config.bias
            self.q = maker.linear(config.width, config.width, bias)
            self.k, self.v = (maker.linear(config.width, own, bias) for _ in range(2))
            self.o = maker.linear(config.width, config.width, bias)
            angles = np.arange(config.length)[:, None] * 0.5 ** np.arange(config.head_dim // 2)
            table = [np.cos(angles), np.sin(angles)]
            self.cos, self.sin = (platform.tensor(x, maker.dtype, maker.device) for x in table)

        def forward(self, x: Any) -> Any:
            q, k, v = (self.heads(layer(x)) for layer in (self.q, self.k, self.v))
            q, k = self.rotated(q), self.rotated(k)
            times = q.shape[1] // k.shape[1]
            mixed = platform.scaled_dot_product_attention(
                q, self.repeated(k, times), self.repeated(v, times), is_causal=True
            )
            batch, heads, length, size = mixed.shape
            return self.o(platform.reshape(platform.transpose(mixed, 1, 2), (batch, length, heads * size)))

        def heads(self, x: Any) -> Any:
            batch, length, size = x.shape
            return platform.transpose(
                platform.reshape(x, (batch, length, size // self.head_dim, self.head_dim)), 1, 2
            )

        def rotated(self, x: Any) -> Any:
            half = self.head_dim // 2
            a, b = platform.split(x, [half, half], 3)
            return platform.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], 3)

        def repeated(self, x: Any, times: int) -> Any:
            batch, heads, length, size = x.shape
            several = platform.cat([platform.reshape(x, (batch, heads, 1, length, size))] * times, 2)
            return platform.reshape(several, (batch, heads * times, length, size))

    class MLP(platform.Module):
        def __init__(self, maker: Maker, config: Config) -> None:
            super().__init__()
            self.gate, self.up = (maker.linear(config.width, config.hidden, config.bias) for _ in range(2))
            self.down = maker.linear(config.hidden, config.width, config.bias)

        def forward(self, x: Any) -> Any:
            return self.down(platform.silu(self.gate(x)) * self.up(x))

    class Block(platform.Module):
        def __init__(self, maker: Maker, config: Config) -> None:
            super().__init__()
            self.norm1, self.attention = RMSNorm(maker, config.width), Attention(maker, config)
            self.norm2, self.mlp = RMSNorm(maker, config.width), MLP(maker, config)

        def forward(self, x: Any) -> Any:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    class Model(platform.Module):
        def __init__(self, maker: Maker, config: Config) -> None:
            super().__init__()
            self.embed = maker.embedding(config.vocabulary, config.width)
            self.layers = platform.ModuleList([Block(maker, config) for _ in range(config.layers)])
            self.norm = RMSNorm(maker, config.width)
            self.head = maker.linear(config.width, config.vocabulary, bias=False)
            if config.tied:
                platform.set_parameter(self.head, "weight", platform.get_parameter(self.embed, "weight"))

        def forward(self, ids: Any) -> Any:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x))

    return SimpleNamespace(
        Table=Table, RMSNorm=RMSNorm, Attention=Attention, MLP=MLP, Block=Block, Model=Model
    )


def block_of(world: World, config: Config) -> Any:
    """One layer; its input is :func:`activation`."""
    return classes(world.platform).Block(Maker(world), config)


def model_of(world: World, config: Config) -> Any:
    """A whole model; its input is :func:`token_ids`."""
    return classes(world.platform).Model(Maker(world), config)


def activation(world: World, config: Config, step: int = 0) -> Any:
    """``(BATCH, length, width)``, the same on every rank, that requires grad."""
    x = Maker(world, 100 + step).tensor(BATCH, config.length, config.width)
    return world.platform.set_requires_grad_(x, True)


def token_ids(world: World, config: Config, step: int = 0) -> tuple[Any, Any]:
    """Ids and targets ``(BATCH, length)``."""
    maker = Maker(world, 100 + step)
    ids = (maker.ids(config.vocabulary, BATCH, config.length) for _ in range(2))
    return next(ids), next(ids)
