"""A decoder-only transformer on bytes, written once for all frameworks: RMSNorm, rotary attention, SwiGLU, tied to nothing.

Nothing here knows of processes or shards. The platform is bound when this module is imported, which is when training starts.

Sources: RMSNorm, Zhang and Sennrich 2019 (arXiv 1910.07467); rotary positions, Su et al. 2021 (arXiv 2104.09864);
SwiGLU, Shazeer 2020 (arXiv 2002.05202); pre-norm blocks as in Llama, Touvron et al. 2023 (arXiv 2302.13971).
Shapes in names: B batch, L length, D model width, H heads, K head width, V vocabulary.
"""

# mypy: disable-error-code="name-defined,misc,attr-defined"

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hp_platform import get_platform
from hyper_parallel.trainer.options import VOCABULARY, ModelSize

nn = get_platform()
Tensor = Any


class Initializer:
    """Initial values that depend on the seed and the parameter's place in the model alone, not on ranks or framework."""

    def __init__(self, seed: int, dtype: str, device: str) -> None:
        self._seeds: Iterator[int] = iter(range(seed * 1_000_003, (seed + 1) * 1_000_003))
        self.dtype, self.device = dtype, device

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> Any:
        """A parameter ``(rows, columns)``, uniform with variance ``gain**2 / columns``."""
        bound = gain * (3.0 / columns) ** 0.5
        return nn.parameter(
            nn.uniform(
                (rows, columns), -bound, bound, seed=next(self._seeds), dtype=self.dtype, device=self.device
            )
        )

    def ones(self, size: int) -> Any:
        """A parameter ``(size,)`` of ones."""
        return nn.parameter(nn.full((size,), 1.0, self.dtype, self.device))


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim."""

    def __init__(self, init: Initializer, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = init.ones(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * nn.rsqrt(nn.mean(x * x, -1, keepdim=True) + self.eps) * self.weight


def rotary_tables(length: int, head_width: int, base: float = 10_000.0) -> tuple[Any, Any]:
    """cos and sin of ``position * base ** (-2 i / K)`` as numpy ``(L, K / 2)``."""
    import numpy as np

    angles = np.arange(length)[:, None] * base ** (-np.arange(0, head_width, 2) / head_width)
    return np.cos(angles), np.sin(angles)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; no biases."""

    def __init__(self, init: Initializer, size: ModelSize) -> None:
        super().__init__()
        self.heads, self.width = size.heads, size.dim // size.heads
        self.query = init.matrix(size.dim, size.dim)
        self.key = init.matrix(size.dim, size.dim)
        self.value = init.matrix(size.dim, size.dim)
        self.out = init.matrix(size.dim, size.dim, gain=(2 * size.layers) ** -0.5)
        cos, sin = rotary_tables(size.length, self.width)
        nn.register_buffer(self, "cos", nn.tensor(cos, init.dtype, init.device))
        nn.register_buffer(self, "sin", nn.tensor(sin, init.dtype, init.device))

    def _split_heads(self, x_BLD: Tensor) -> Tensor:
        batch, length, _ = x_BLD.shape
        return nn.transpose(nn.reshape(x_BLD, (batch, length, self.heads, self.width)), 1, 2)

    def _rotate(self, x_BHLK: Tensor) -> Tensor:
        length = x_BHLK.shape[2]
        cos, sin = (nn.cast(nn.narrow(t, 0, 0, length), x_BHLK.dtype) for t in (self.cos, self.sin))
        a, b = nn.split(x_BHLK, [self.width // 2, self.width // 2], -1)
        return nn.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x_BLD: Tensor) -> Tensor:
        q = self._rotate(self._split_heads(nn.linear(x_BLD, self.query)))
        k = self._rotate(self._split_heads(nn.linear(x_BLD, self.key)))
        v = self._split_heads(nn.linear(x_BLD, self.value))
        mixed_BHLK = nn.scaled_dot_product_attention(q, k, v, is_causal=True)
        return nn.linear(nn.reshape(nn.transpose(mixed_BHLK, 1, 2), tuple(x_BLD.shape)), self.out)


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, init: Initializer, size: ModelSize) -> None:
        super().__init__()
        self.gate = init.matrix(size.hidden, size.dim)
        self.up = init.matrix(size.hidden, size.dim)
        self.down = init.matrix(size.dim, size.hidden, gain=(2 * size.layers) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.linear(nn.silu(nn.linear(x, self.gate)) * nn.linear(x, self.up), self.down)


class Block(nn.Module):
    """One decoder layer; what the trainer makes a unit of sharding."""

    def __init__(self, init: Initializer, size: ModelSize) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(init, size.dim)
        self.attention = Attention(init, size)
        self.feed_forward_norm = RMSNorm(init, size.dim)
        self.feed_forward = FeedForward(init, size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """Bytes ``(B, L)`` to logits ``(B, L, V)``."""

    def __init__(self, size: ModelSize, *, seed: int, dtype: str, device: str) -> None:
        super().__init__()
        init = Initializer(seed, dtype, device)
        self.embedding = init.matrix(VOCABULARY, size.dim)
        self.layers = nn.ModuleList([Block(init, size) for _ in range(size.layers)])
        self.norm = RMSNorm(init, size.dim)
        self.head = init.matrix(VOCABULARY, size.dim)

    def forward(self, ids_BL: Tensor) -> Tensor:
        x = nn.embedding(ids_BL, self.embedding)
        for layer in self.layers:
            x = layer(x)
        return nn.linear(self.norm(x), self.head)


def loss_of(model: Any, ids_BL: Tensor, targets_BL: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte."""
    logits = model(ids_BL)
    return nn.cross_entropy(nn.reshape(logits, (-1, VOCABULARY)), nn.reshape(targets_BL, (-1,)))
