"""Sizes of the models, and of the sequences that they are measured with. Needs no framework."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Of a decoder and its input."""

    dim: int
    layers: int
    heads: int
    groups: int
    """Heads of keys and values."""
    hidden: int
    """Units of the feed-forward part."""
    vocabulary: int
    length: int
    """Tokens in a sequence."""


SIZES = {
    "tiny": Sizes(64, 4, 4, 2, 128, 256, 64),
    "1b": Sizes(2048, 16, 16, 8, 8192, 32000, 4096),
    "8b": Sizes(4096, 32, 32, 8, 14336, 128256, 4096),
}
