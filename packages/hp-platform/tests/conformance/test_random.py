"""RandomOps: the framework's generators, and the words and floats of the counter-based one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hp_platform.philox import philox_4x32_10


def words(seed: int, stream: int, start: int, count: int) -> list[int]:
    """The definition, word by word, in Python's own integers."""
    mask = 0xFFFFFFFF
    key = (seed & mask, seed >> 32 & mask)
    blocks = {}
    for i in range(start, start + count):
        block = i // 4
        if block not in blocks:
            blocks[block] = philox_4x32_10(
                (block & mask, block >> 32, stream & mask, stream >> 32 & mask), key
            )
    return [blocks[i // 4][i % 4] for i in range(start, start + count)]


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 2**63 - 1])
@pytest.mark.parametrize("stream", [0, 7, 2**40])
@pytest.mark.parametrize(("start", "count"), [(0, 8), (3, 6), (5, 1), (7, 0), (4 * 2**32 - 3, 9)])
def test_random_bits_are_the_words_of_the_published_cipher(
    platform, device, equal, seed, stream, start, count
):
    bits = platform.random_bits(seed, stream, start, count, device)
    assert platform.dtype_name(bits.dtype) == "int64"
    assert platform.device_of(bits) == platform.device(device).current()
    equal(bits, np.array(words(seed, stream, start, count), dtype=np.int64))


def test_random_bits_begin_with_the_known_answer(platform, device, equal):
    equal(platform.random_bits(0, 0, 0, 4, device), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8])


def test_a_part_of_the_words_is_drawn_alone(platform, device, equal):
    whole = platform.to_numpy(platform.random_bits(3, 1, 0, 100, device))
    for start, count in ((0, 100), (1, 2), (17, 50), (99, 1)):
        equal(platform.random_bits(3, 1, start, count, device), whole[start : start + count])


def test_negative_positions_are_refused(platform, device):
    with pytest.raises(ValueError, match="0 or more"):
        platform.random_bits(0, 0, -1, 3, device)
    with pytest.raises(ValueError, match="0 or more"):
        platform.random_bits(0, 0, 0, -3, device)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-2.0, 3.0), (1.0, 2.0), (-1.0, -0.5)])
def test_uniform_numbers_follow_the_formula_and_stay_in_the_interval(platform, device, dtype, low, high):
    shape = (7, 1000)
    x = platform.uniform(shape, low, high, seed=11, dtype=dtype, device=device)
    assert platform.dtype_name(x.dtype) == dtype
    assert tuple(x.shape) == shape
    got = platform.to_numpy(x).astype(np.float64)
    bits = np.array(words(11, 0, 0, 2 * 7000 if dtype == "float64" else 7000), dtype=np.int64)
    if dtype == "float64":
        unit = ((bits[0::2] >> 5) * 2**26 + (bits[1::2] >> 6)) * 2.0**-53
    else:
        unit = (bits >> 8) * 2.0**-24
    expected = (low + (high - low) * unit).reshape(shape)
    # One rounding to the dtype, at the magnitude of the larger end; a number that rounds up to `high` moves one place down.
    place = {"float32": 2.0**-23, "float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    assert np.abs(got - expected).max() <= place * max(abs(low), abs(high))
    assert low <= got.min()
    assert got.max() < high


def test_uniform_float32_numbers_are_the_same_bits_everywhere(platform, device):
    x = platform.uniform((4,), -1.0, 1.0, seed=3, device=device)
    assert platform.dtype_name(x.dtype) == "float32"
    expected = [np.float32(-1.0 + 2.0 * ((word >> 8) * 2.0**-24)) for word in words(3, 0, 0, 4)]
    assert platform.to_numpy(x).tolist() == [float(e) for e in expected]


def test_uniform_numbers_of_any_shape_are_one_sequence(platform, device, equal):
    flat = platform.to_numpy(platform.uniform((12,), 0.0, 1.0, seed=5, device=device))
    equal(platform.uniform((3, 4), 0.0, 1.0, seed=5, device=device), flat.reshape(3, 4))
    equal(platform.uniform((), 0.0, 1.0, seed=5, device=device), flat[0])
    assert tuple(platform.uniform((0, 4), 0.0, 1.0, seed=5, device=device).shape) == (0, 4)


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (2.0, 1.0), (0.0, math.inf), (math.nan, 1.0)])
def test_an_interval_without_numbers_is_refused(platform, device, low, high):
    with pytest.raises(ValueError, match="finite low < high"):
        platform.uniform((2,), low, high, seed=0, device=device)


def test_uniform_numbers_of_an_integer_dtype_are_refused(platform, device):
    with pytest.raises(ValueError, match="int32"):
        platform.uniform((2,), 0.0, 1.0, seed=0, dtype="int32", device=device)


def test_seeding_puts_the_generators_into_a_known_state(platform, device):
    def snapshot():
        state = platform.get_rng_state(device)
        return platform.to_numpy(state).tolist() if platform.is_tensor(state) else state

    platform.manual_seed(1)
    one = snapshot()
    state = platform.get_rng_state(device)
    platform.manual_seed(2)
    assert snapshot() != one
    platform.set_rng_state(state, device)
    assert snapshot() == one
    platform.manual_seed(1)
    assert snapshot() == one
