"""A plain decoder in the manner of Llama (Touvron et al., arXiv 2302.13971): rms_norm, rotary positions, sdpa, swiglu.

Shapes: B batch, S sequence, D model, H heads, E width of a head. Computes in the dtype of its parameters. Its sizes:
:mod:`bench.models.sizes`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from bench.models.sizes import Sizes


def rotary(length: int, width: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Cosines and sines (S, E) of the angles of each position and pair."""
    rates = 10000.0 ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), rates).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turned(x_BHSE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Every pair of features by its angle."""
    first, second = x_BHSE.chunk(2, -1)
    return x_BHSE * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    """Causal, with fewer heads of keys and values than of queries."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.width = sizes.dim // sizes.heads
        self.q = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.k = nn.Linear(sizes.dim, sizes.groups * self.width, bias=False)
        self.v = nn.Linear(sizes.dim, sizes.groups * self.width, bias=False)
        self.o = nn.Linear(sizes.dim, sizes.dim, bias=False)

    def forward(self, x_BSD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(B, S, D) -> (B, S, D)."""
        q, k, v = (
            linear(x_BSD).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        a = functional.scaled_dot_product_attention(
            turned(q, cos, sin), turned(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.o(a.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """swiglu (Shazeer, arXiv 2002.05202)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.dim, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.dim, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) -> (B, S, D)."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(sizes.dim, eps=1e-5)
        self.attention = Attention(sizes)
        self.norm2 = nn.RMSNorm(sizes.dim, eps=1e-5)
        self.feed_forward = FeedForward(sizes)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(B, S, D) -> (B, S, D)."""
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.feed_forward(self.norm2(x))


class Llama(nn.Module):
    """Tokens (B, S) -> logits (B, S, vocabulary)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.dim, eps=1e-5)
        self.head = nn.Linear(sizes.dim, sizes.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the next token."""
        x = self.embedding(ids)
        cos, sin = rotary(ids.shape[1], self.sizes.dim // self.sizes.heads, x.device, x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))
