"""Text from the model, byte by byte. All ranks call, since the parameters are sharded; all get the same text."""

from __future__ import annotations

from typing import Any

from hp_platform import get_platform


def generate(
    model: Any, prompt: bytes, *, count: int, length: int, seed: int, device: str, temperature: float = 0.7
) -> bytes:
    """``prompt`` and ``count`` further bytes, drawn from the softmax at ``temperature`` of at most ``length`` bytes of context.

    The draw of byte i depends on (seed, i) alone. Communication: the gathers of ``count`` forward passes.
    """
    import numpy as np

    platform = get_platform()
    words = platform.to_numpy(platform.random_bits(seed, 1, 0, count)) / 2.0**32
    text = list(prompt)
    with platform.no_grad():
        for i in range(count):
            # A constant shape, padded on the right: causal attention does not look there, and graphs and caches are kept.
            context = text[-length:]
            ids = np.zeros((1, length), np.int64)
            ids[0, : len(context)] = context
            logits = platform.to_numpy(platform.cast(model(platform.tensor(ids, device=device)), "float32"))[
                0, len(context) - 1
            ]
            scaled = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
            cumulative = np.cumsum(scaled / scaled.sum())
            text.append(int(min(np.searchsorted(cumulative, words[i], side="right"), len(cumulative) - 1)))
    return bytes(text)


def printable(text: bytes) -> str:
    """``text`` for a terminal: what is no UTF-8, and what would steer the terminal, becomes U+FFFD."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for c in text.decode(errors="replace")
    )
