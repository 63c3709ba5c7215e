"""The cipher against the known answers that its authors publish, on Python's integers and on numpy's int64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_platform.philox import MASK, block_range, philox_4x32_10, words_of_blocks
from hp_platform.uniform import largest_below

pytestmark = pytest.mark.once

# Source: kat_vectors of Random123.
KNOWN = [
    ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((MASK,) * 4, (MASK,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
@pytest.mark.parametrize("kind", [int, lambda word: np.array([word], dtype=np.int64)], ids=["int", "int64"])
def test_the_cipher_gives_the_published_words(counter, key, words, kind):
    got = philox_4x32_10(tuple(kind(c) for c in counter), key)
    assert [f"{int(np.asarray(word).item()):08x}" for word in got] == words.split()


@given(block=st.integers(0, 2**62), seed=st.integers(-(2**63), 2**64), stream=st.integers(0, 2**64 - 1))
def test_int64_arrays_give_the_words_of_unbounded_integers(block, seed, stream):
    arrays = words_of_blocks(np.array([block], dtype=np.int64), seed, stream)
    counter = (block & MASK, block >> 32, stream & MASK, stream >> 32)
    expected = philox_4x32_10(counter, (seed & MASK, seed >> 32 & MASK))
    assert tuple(int(a[0]) for a in arrays) == expected


@pytest.mark.parametrize(
    ("start", "count", "blocks"),
    [(0, 0, (0, 0)), (0, 1, (0, 1)), (3, 2, (0, 2)), (4, 4, (1, 2)), (5, 8, (1, 4))],
)
def test_a_range_of_words_lies_in_a_range_of_blocks(start, count, blocks):
    assert block_range(start, count) == blocks


@pytest.mark.parametrize("value", [1.0, 2.0, 0.75, -1.0, -0.5, 0.0, 3.0e4, 2.0**-14, 2.0**-15, -(2.0**-14)])
@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_the_number_below_is_numpys(name, value):
    below = np.nextafter(np.dtype(name).type(value), np.dtype(name).type(-np.inf))
    assert largest_below(value, name) == float(below)
