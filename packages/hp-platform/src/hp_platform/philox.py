"""Philox-4x32-10: random words that depend on (seed, stream, index) alone.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The cipher is written once, over
anything whose ``* >> & ^`` work on int64: numpy arrays, torch and MindSpore tensors, and plain Python ints.

[Note: 32-bit words in int64] Products of two 32-bit words fill 64 bits, which a signed int64 holds as a negative number when the
highest bit is set. The bits are the right ones all the same; ``>> 32`` then fills with ones from the left, and ``& MASK``
removes them, so the high word is right as well.
"""

from __future__ import annotations

from typing import Any

MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
LANES = 4
"""Words per block."""


def philox_4x32_10(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """The block at ``counter``: four words in ``[0, 2**32)``.

    ``counter``: four words in ``[0, 2**32)``, lowest first, int64 arrays that broadcast with each other or ints; ``key``: two
    words, lowest first.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        low_product = c0 * _MULTIPLIERS[0]
        high_product = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((high_product >> 32) & MASK) ^ c1 ^ k0,
            high_product & MASK,
            ((low_product >> 32) & MASK) ^ c3 ^ k1,
            low_product & MASK,
        )
        k0 = (k0 + _KEY_STEPS[0]) & MASK
        k1 = (k1 + _KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def block_range(start: int, count: int) -> tuple[int, int]:
    """First block, and one past the last, that hold the words ``start ... start + count - 1``.

    Word i is lane ``i % 4`` of block ``i // 4``. ValueError for negative numbers.
    """
    if start < 0 or count < 0:
        raise ValueError(f"random words from {start}, {count} of them: both numbers must be 0 or more")
    return start // LANES, -(-(start + count) // LANES)


def words_of_blocks(blocks: Any, seed: int, stream: int) -> tuple[Any, Any, Any, Any]:
    """The four lanes of each block of ``blocks`` (int64, block numbers): key ``seed``, high half of the counter ``stream``.

    ``seed`` and ``stream`` are taken modulo 2**64.
    """
    counter = (blocks & MASK, (blocks >> 32) & MASK, stream & MASK, (stream >> 32) & MASK)
    return philox_4x32_10(counter, (seed & MASK, (seed >> 32) & MASK))
