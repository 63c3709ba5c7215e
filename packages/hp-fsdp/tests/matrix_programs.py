"""The five kinds of programs that are trained in every mode, and what by hand is known of their units."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fsdp_models import ROWS, Maker
from fsdp_models import mlp as build_mlp

WIDTH = 4
HEADS = 2
VOCABULARY = 7
"""Cut among 2, 3 and 4 ranks: 4 and 3; 3, 3, 1; 2, 2, 2, 1."""
NUM_EXPERTS = 4
LENGTH = 6


@dataclass(frozen=True)
class MatrixProgram:
    """A model, its inner units, and what it reads."""

    build: Callable[[Maker], Any]
    units: tuple[str, ...]
    """Of ``fully_shard``, beside the whole, in the order in which they run."""
    input_shape: tuple[int, ...] = (ROWS, WIDTH)
    vocabulary: int = 0
    """Of integer inputs; 0: floats."""
    owners: Mapping[str, str] = field(default_factory=dict)
    """Name of a parameter -> the unit that has it, where that is not the innermost one around its first place."""
    without_backward: tuple[str, ...] = ()
    """Units that nothing in backward needs: no input and no parameter of theirs wants a gradient."""
    replicated: tuple[str, ...] = ()
    """Parameters for ``replicate_params``, some in every unit."""

    def inputs(self, maker: Maker, rank: int, batch: int) -> Any:
        random = np.random.default_rng(100 * batch + rank)
        if self.vocabulary:
            ids = random.integers(0, self.vocabulary, self.input_shape)
            return maker.platform.tensor(ids, "int64", maker.device)
        return maker.platform.tensor(
            np.asarray(random.uniform(-1, 1, self.input_shape)), maker.dtype, maker.device
        )

    def unit_of(self, name: str) -> str:
        """The unit that has a parameter; ``""`` is the whole."""
        inside = [unit for unit in self.units if name.startswith(f"{unit}.")]
        return self.owners.get(name, max(inside, key=len, default=""))


# ------------------------------------------------------------------------------------------------------------- transformer
def _rms_norm(maker: Maker, width: int) -> Any:
    platform = maker.platform

    def forward(module: Any, x: Any, rank: int) -> Any:
        scale = platform.rsqrt(platform.mean(x * x, -1, keepdim=True) + 1)
        return x * scale * module.weight

    return maker.model(lambda module: setattr(module, "weight", maker.parameter(width)), forward)


def _attention(maker: Maker) -> Any:
    platform = maker.platform

    def setup(module: Any) -> None:
        for name in ("query", "key", "value", "out"):
            setattr(module, name, maker.linear(WIDTH, WIDTH))

    def heads(x: Any) -> Any:
        batch, length, _ = x.shape
        return platform.transpose(platform.reshape(x, (batch, length, HEADS, WIDTH // HEADS)), 1, 2)

    def forward(module: Any, x: Any, rank: int) -> Any:
        q, k, v = (heads(part(x)) for part in (module.query, module.key, module.value))
        y = platform.transpose(platform.scaled_dot_product_attention(q, k, v, is_causal=True), 1, 2)
        return module.out(platform.reshape(y, tuple(x.shape)))

    return maker.model(setup, forward)


def _transformer_block(maker: Maker) -> Any:
    def setup(module: Any) -> None:
        module.norm = _rms_norm(maker, WIDTH)
        module.attention = _attention(maker)
        module.mlp = maker.block(WIDTH, 5)

    def forward(module: Any, x: Any, rank: int) -> Any:
        return module.mlp(x + module.attention(module.norm(x)))

    return maker.model(setup, forward)


def transformer(maker: Maker) -> Any:
    """The embedding is the head as well."""

    def setup(module: Any) -> None:
        module.embed = maker.embedding(VOCABULARY, WIDTH)
        module.blocks = maker.platform.ModuleList([_transformer_block(maker) for _ in range(2)])
        module.norm = _rms_norm(maker, WIDTH)
        module.head = maker.linear(VOCABULARY, WIDTH)
        module.head.weight = module.embed.weight

    def forward(module: Any, ids: Any, rank: int) -> Any:
        x = module.embed(ids)
        for block in module.blocks:
            x = block(x)
        return module.head(module.norm(x))

    return maker.model(setup, forward)


# ------------------------------------------------------------------------------------------------------------------- lora
def _lora(maker: Maker, rows: int, columns: int) -> Any:
    """A frozen layer with two adapters of rank 2, one of them out of use."""
    platform = maker.platform

    def setup(module: Any) -> None:
        module.base = maker.linear(rows, columns, requires_grad=False)
        module.down = maker.parameter(2, columns)
        module.up = maker.parameter(rows, 2)
        module.other_down = maker.parameter(2, columns)
        module.other_up = maker.parameter(rows, 2)

    def forward(module: Any, x: Any, rank: int) -> Any:
        return module.base(x) + platform.linear(platform.linear(x, module.down), module.up)

    return maker.model(setup, forward)


def lora(maker: Maker) -> Any:
    """A frozen stem, two layers with adapters, and a head with one."""

    def setup(module: Any) -> None:
        module.stem = maker.linear(WIDTH, WIDTH, requires_grad=False)
        module.layers = maker.platform.ModuleList([_lora(maker, 5, WIDTH), _lora(maker, WIDTH, 5)])
        module.head = _lora(maker, 3, WIDTH)

    def forward(module: Any, x: Any, rank: int) -> Any:
        x = module.stem(x)
        for layer in module.layers:
            x = maker.platform.silu(layer(x))
        return module.head(x)

    return maker.model(setup, forward)


# ------------------------------------------------------------------------------------------------------------------- conv
def _conv1d(maker: Maker) -> Callable[[Any, Any], Any]:
    """``x (batch, channels, length)`` with ``weight (out, channels, kernel)``: torch's own, elsewhere a sum of linear layers."""
    platform = maker.platform
    if platform.platform_type.value == "torch":
        conv1d: Callable[[Any, Any], Any] = importlib.import_module("torch").nn.functional.conv1d
        return conv1d

    def composed(x: Any, weight: Any) -> Any:
        out, channels, kernel = weight.shape
        length = x.shape[2] - kernel + 1
        total = None
        for k in range(kernel):
            part = platform.transpose(platform.narrow(x, 2, k, length), 1, 2)
            tap = platform.reshape(platform.narrow(weight, 2, k, 1), (out, channels))
            y = platform.linear(part, tap)
            total = y if total is None else total + y
        return platform.transpose(total, 1, 2)

    return composed


def _conv_layer(maker: Maker, out: int, channels: int) -> Any:
    """Convolution and batch norm with running statistics, as in evaluation."""
    platform, conv1d = maker.platform, _conv1d(maker)

    def setup(module: Any) -> None:
        module.weight = maker.parameter(out, channels, 2)
        module.scale = maker.parameter(out, 1)
        module.shift = maker.parameter(out, 1)
        for name in ("running_mean", "running_deviation"):
            values = maker.random.uniform(0.5, 1.5, (out, 1))
            platform.register_buffer(module, name, platform.tensor(values, maker.widest, maker.device))

    def forward(module: Any, x: Any, rank: int) -> Any:
        y = conv1d(x, module.weight)
        mean, deviation = (platform.cast(b, y.dtype) for b in (module.running_mean, module.running_deviation))
        return platform.relu((y - mean) / deviation * module.scale + module.shift)

    return maker.model(setup, forward)


def conv(maker: Maker) -> Any:
    platform = maker.platform

    def setup(module: Any) -> None:
        module.layers = platform.ModuleList([_conv_layer(maker, 5, 3), _conv_layer(maker, 3, 5)])
        module.head = maker.linear(3, 3 * (LENGTH - 2))

    def forward(module: Any, x: Any, rank: int) -> Any:
        for layer in module.layers:
            x = layer(x)
        return module.head(platform.reshape(x, (x.shape[0], -1)))

    return maker.model(setup, forward)


# -------------------------------------------------------------------------------------------------------------------- moe
def _experts(maker: Maker) -> Any:
    """A router and four experts: samples go to the one that ``rank`` says, and never to the last one."""
    platform = maker.platform

    def setup(module: Any) -> None:
        module.router = maker.linear(NUM_EXPERTS, WIDTH)
        module.experts = platform.ModuleList([maker.block(WIDTH, 3 + e) for e in range(NUM_EXPERTS)])

    def forward(module: Any, x: Any, rank: int) -> Any:
        chosen = rank % (NUM_EXPERTS - 1)
        share = platform.narrow(platform.softmax(module.router(x)), 1, chosen, 1)
        return x + share * module.experts[chosen](x)

    return maker.model(setup, forward)


def moe(maker: Maker) -> Any:
    def setup(module: Any) -> None:
        module.layers = maker.platform.ModuleList([_experts(maker) for _ in range(2)])
        module.head = maker.linear(3, WIDTH)

    def forward(module: Any, x: Any, rank: int) -> Any:
        for at, layer in enumerate(module.layers):
            x = layer(x, rank=rank + at)
        return module.head(x)

    return maker.model(setup, forward)


PROGRAMS = {
    "mlp": MatrixProgram(
        build_mlp,
        ("blocks.0", "blocks.1"),
        replicated=("blocks.0.inner.weight", "blocks.1.outer.bias", "head.bias"),
    ),
    "transformer": MatrixProgram(
        transformer,
        ("embed", "blocks.0", "blocks.1"),
        (ROWS, 3),
        vocabulary=VOCABULARY,
        # The head, outside of the unit of the embedding, has it too.
        owners={"embed.weight": ""},
        replicated=("blocks.0.norm.weight", "blocks.1.attention.key.weight", "norm.weight"),
    ),
    "lora": MatrixProgram(
        lora,
        ("stem", "layers.0", "layers.1"),
        without_backward=("stem",),
        replicated=("stem.bias", "layers.0.up", "layers.1.base.weight", "head.other_up"),
    ),
    "conv": MatrixProgram(
        conv,
        ("layers.0", "layers.1"),
        (ROWS, 3, LENGTH),
        replicated=("layers.0.scale", "layers.1.weight", "head.weight"),
    ),
    "moe": MatrixProgram(
        moe,
        ("layers.0", "layers.1"),
        replicated=("layers.0.router.weight", "layers.1.experts.3.inner.bias", "head.bias"),
    ),
}
