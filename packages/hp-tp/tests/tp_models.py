"""Llama-like models, written once on the platform with the framework's own layers; their plans; and the way to train them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from hp_dtensor import DTensor, Replicate, Shard
from hp_platform import DeviceMesh, init_device_mesh
from hp_platform.testing import World, assert_parity
from hp_tp import (
    ColwiseParallel,
    ModuleCuts,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
    vocab_parallel_cross_entropy,
)

BATCH = 2
LEARNING_RATE = 0.1
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


# ------------------------------------------------------------------------------------------------------------------- plans
def block_plan(
    config: Config,
    tp: int,
    *,
    sequence: bool = False,
    use_local: bool = True,
    is_plain: bool = False,
    prefix: str = "",
) -> dict[str, Any]:
    """The plan of one layer whose input and output are whole, or with ``sequence`` cut along dim 1.

    ``use_local`` False: the residual stream is made of DTensors, as it must be if the length does not divide. ``is_plain``: there are
    no DTensors at all among the activations, as it must be in compiled layers.
    """
    out = {"output_layouts": Shard(1) if sequence else Replicate(), "use_local_output": use_local}
    given: dict[str, Any] = {"input_layouts": Shard(1)} if is_plain and sequence else {}
    kv: dict[str, Any] = {"heads": config.kv_heads}
    if config.kv_heads % tp:
        kv = {"heads": config.kv_heads, "query_heads": config.heads, "replicate_kv": True}
    plan: dict[str, Any] = {
        "attention.q": ColwiseParallel(heads=config.heads, **given),
        "attention.[kv]": ColwiseParallel(**kv, **given),
        "attention.o": RowwiseParallel(heads=config.heads, **out),
        "mlp.gate": ColwiseParallel(**given),
        "mlp.up": ColwiseParallel(**given),
        "mlp.down": RowwiseParallel(**out),
    }
    if sequence:
        plan["norm[12]"] = norm_style(is_plain)
    return {prefix + name: style for name, style in plan.items()}


def norm_style(is_plain: bool) -> SequenceParallel:
    return SequenceParallel(use_local_output=is_plain, local=is_plain or None)


def model_plan(
    config: Config,
    tp: int,
    *,
    sequence: bool = False,
    use_local: bool = True,
    is_plain: bool = False,
    logits: Any = None,
) -> dict[str, Any]:
    """The plan of a whole model; ``logits``: how they come out, whole and plain unless said otherwise."""
    first = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(output_layouts=first, use_local_output=use_local),
        **block_plan(
            config, tp, sequence=sequence, use_local=use_local, is_plain=is_plain, prefix="layers.*."
        ),
        "head": ColwiseParallel(
            input_layouts=first if is_plain else None,
            output_layouts=Replicate() if logits is None else logits,
            use_local_output=logits is None,
        ),
    }
    if sequence:
        plan["norm"] = norm_style(is_plain)
    return plan


# ---------------------------------------------------------------------------------------------------------------- training
def mean_square(platform: Any, output: Any) -> Any:
    """A loss that is not the same for all elements: a plain sum would hide gradients in the wrong places."""
    return platform.mean(output * output)


def cross_entropy(platform: Any, logits: Any, targets: Any) -> Any:
    """Of logits ``(BATCH, length, vocabulary)``, whole; or DTensors whose classes are cut."""
    if isinstance(logits, DTensor):
        rows = logits.reshape((-1, logits.shape[-1]))
        return vocab_parallel_cross_entropy(rows, platform.reshape(targets, (-1,)))
    return platform.cross_entropy(
        platform.reshape(logits, (-1, logits.shape[-1])), platform.reshape(targets, (-1,))
    )


def backward(platform: Any, loss: Any) -> None:
    if isinstance(loss, DTensor):
        loss.backward()
    else:
        platform.backward([loss])


def local(parameter: Any) -> Any:
    """The plain tensor that this rank holds of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def sgd_step(platform: Any, model: Any) -> None:
    """``p = p - lr * grad``, and no gradients any more."""
    for _, parameter in platform.named_parameters(model):
        piece = local(parameter)
        gradient = platform.get_grad(piece)
        if gradient is not None:
            platform.add_(piece, gradient, alpha=-LEARNING_RATE)
            platform.set_grad(piece, None)


def whole_gradients(platform: Any, model: Any) -> dict[str, Any]:
    """Gradients by name, put together from all ranks."""
    found = {}
    for name, parameter in platform.named_parameters(model):
        gradient = parameter.grad if isinstance(parameter, DTensor) else platform.get_grad(parameter)
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


def whole_parameters(platform: Any, model: Any) -> dict[str, Any]:
    """Parameters by name, put together from all ranks."""
    return {
        name: platform.detach(p.full_tensor() if isinstance(p, DTensor) else p)
        for name, p in platform.named_parameters(model)
    }


def check_steps(
    world: World,
    build: Callable[[], Any],
    plan: Mapping[str, Any],
    loss_of: Callable[[Any, int], Any],
    *,
    reference_loss_of: Callable[[Any, int], Any] | None = None,
    steps: int = 3,
) -> Any:
    """Losses, every gradient, and the parameters after some steps are those of one process. Returns the parallel model.

    ``loss_of(model, step)`` runs a model; ``reference_loss_of`` is the same for one process where that reads otherwise.
    """
    platform, limits = world.platform, tolerance(world)
    reference, model = build(), parallelize_module(build(), make_mesh(world), plan)
    for step in range(steps):
        expected = (reference_loss_of or loss_of)(reference, step)
        found = loss_of(model, step)
        assert_parity(found, expected, **limits, name=f"loss of step {step}")
        backward(platform, expected)
        backward(platform, found)
        assert_parity(
            whole_gradients(platform, model),
            whole_gradients(platform, reference),
            **limits,
            name=f"gradients of step {step}",
        )
        sgd_step(platform, reference)
        sgd_step(platform, model)
    assert_parity(
        whole_parameters(platform, model),
        whole_parameters(platform, reference),
        **limits,
        name="parameters after the steps",
    )
    return model
