"""Draws: every device and framework gives the same bits, and any part of a tensor is drawn alone."""

from __future__ import annotations

import numpy as np
import pytest

from hp_platform.draws import Distribution, Region
from hp_platform.draws.host_arrays import draw_on_host
from hp_platform.random_stream import default_random_stream

DISTRIBUTIONS = {
    "words": Distribution.words(),
    "longs": Distribution.longs(),
    "integers": Distribution.integers(-3, 4, "int32"),
    "many integers": Distribution.integers(-(2**62), 2**62 - 1, "int64"),
    "integers as float16": Distribution.integers(0, 10, "float16"),
    "event": Distribution.event(0.3),
    "uniform": Distribution.uniform(-1.0, 3.0, "float32"),
    "uniform float64": Distribution.uniform(-1.0, 3.0, "float64"),
    "uniform float16": Distribution.uniform(0.0, 1.0, "float16"),
    "uniform bfloat16": Distribution.uniform(0.0, 1.0, "bfloat16"),
    "normal": Distribution.normal(0.5, 2.0, "float32"),
    "normal float64": Distribution.normal(0.5, 2.0, "float64"),
    "normal bfloat16": Distribution.normal(0.0, 1.0, "bfloat16"),
    "exponential": Distribution.exponential(2.0, "float32"),
    "exponential float64": Distribution.exponential(2.0, "float64"),
    "truncated": Distribution.truncated(0.0, 1.0, -2.0, 2.0, "float32"),
    "truncated float64": Distribution.truncated(0.0, 1.0, -2.0, 2.0, "float64"),
}

# The first three of the 7 x 8 elements at (1, 2) of a (9, 11) tensor, seed 3, operation 4.
REGION = Region((9, 11), (1, 2), (7, 8))
KNOWN = {
    "words": [27078808, 2498345999, 1208167541],
    "longs": [1235500001887566457, 963240999941500391, 3844538918778862159],
    "uniform": [-0.9747810363769531, 1.326766014099121, 0.12519359588623047],
    "uniform float64": [-0.4641872741627924, -0.5822608169860684, 0.6673029664645935],
    "normal": [0.5837068557739258, 0.09321021288633347, 2.541823387145996],
    "normal float64": [3.4364509568881862, -3.183855241073138, 2.621968306563736],
    "truncated float64": [-1.0338274924938025, -1.1629094722459998, -0.20033270681644014],
}

# Long rows, short rows, one element, rows at every distance to the next block of four, three levels of steps, nothing.
REGIONS = [
    Region.whole((13,)),
    Region.whole(()),
    Region((20,), (5,), (11,)),
    Region.whole((5, 8)),
    Region((6, 8), (2, 4), (3, 4)),
    Region((6, 7), (1, 0), (4, 3)),
    Region((6, 7), (0, 6), (6, 1)),
    Region((2, 3, 4, 5), (0, 1, 0, 2), (2, 2, 4, 2)),
    Region((3, 2, 3, 2, 3), (0, 1, 0, 1, 0), (2, 1, 2, 1, 2)),
    Region((4, 3), (4, 0), (0, 3)),
    Region((3, 5000), (1, 7), (2, 4990)),
]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_draws_are_equal_to_the_bit_on_every_device(platform, device, equal, name):
    distribution = DISTRIBUTIONS[name]
    for seed, stream in ((3, 4), (2**31, 2**31 + 5), (2**63 + 11, 2**40 + 1)):
        for region in REGIONS:
            drawn = platform.draw(distribution, seed, stream, region, device)
            assert platform.dtype_name(drawn.dtype) == distribution.result
            assert platform.device_of(drawn) == platform.device(device).current()
            expected = draw_on_host(distribution, seed, stream, region)
            if distribution.result == "bfloat16":
                expected = platform.to_numpy(platform.cast(platform.tensor(expected), "bfloat16"))
            equal(drawn, expected)


@pytest.mark.parametrize("name", KNOWN)
def test_draws_give_the_values_that_are_written_down_here(platform, device, name):
    drawn = platform.to_numpy(platform.draw(DISTRIBUTIONS[name], 3, 4, REGION, device))
    assert drawn.reshape(-1)[:3].tolist() == KNOWN[name]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_dropout_scales_what_it_keeps_and_forgets_nothing_of_the_mask(platform, device, dtype):
    for region in REGIONS:
        values = np.arange(1.0, region.numel + 1).reshape(region.size) % 31 + 1
        x = platform.tensor(values, dtype, device)
        for p in (0.0, 0.25, 0.5, 1.0):
            dropped = draw_on_host(Distribution.event(p), 2**35 + 1, 9, region)
            found = platform.dropout(x, p, 2**35 + 1, 9, region)
            assert platform.dtype_name(found.dtype) == dtype
            scaled = values * np.float32(1 / (1 - p)) if p < 1 else values * 0
            got = platform.to_numpy(found).astype(np.float64)
            assert got.shape == region.size
            # One product, rounded to the dtype.
            place = {"float32": 2.0**-23, "float64": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[
                dtype
            ]
            np.testing.assert_allclose(got, np.where(dropped, 0.0, scaled), rtol=place, atol=0)


def test_dropout_of_a_part_is_the_part_of_the_dropout(platform, device, equal):
    x = platform.tensor(np.arange(1.0, 61.0).reshape(5, 12), "float32", device)
    whole = platform.to_numpy(platform.dropout(x, 0.4, 1, 2, Region.whole((5, 12))))
    part = platform.contiguous(platform.narrow(platform.narrow(x, 0, 1, 3), 1, 3, 6))
    equal(platform.dropout(part, 0.4, 1, 2, Region((5, 12), (1, 3), (3, 6))), whole[1:4, 3:9])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_dropout_again_has_the_mask_of_the_first_time(platform, device, equal, dtype):
    for region in REGIONS:
        x = platform.full(region.size, 1.0, platform.dtype(dtype), device)
        # Part of something, so that its memory begins where vectors cannot be read.
        longer = platform.tensor(np.arange(3.0, region.numel + 4) % 31 + 1, dtype, device)
        other = platform.reshape(platform.narrow(longer, 0, 1, region.numel), region.size)
        for p in (0.0, 0.25, 1.0):
            for _ in range(2):  # the second time a prepared launch is used
                first, mask = platform.dropout_keeping(x, p, 2**35 + 1, 9, region)
                again = platform.dropout_again(other, mask, p, 2**35 + 1, 9, region)
                equal(first, platform.to_numpy(platform.dropout(x, p, 2**35 + 1, 9, region)))
                equal(again, platform.to_numpy(platform.dropout(other, p, 2**35 + 1, 9, region)))


def test_draws_on_meta_have_no_values(platform, device):
    drawn = platform.draw(DISTRIBUTIONS["normal"], 0, 0, Region.whole((2, 3)), "meta")
    assert platform.device_of(drawn) == "meta"
    assert tuple(drawn.shape) == (2, 3)
    x = platform.empty((2, 3), "float32", "meta")
    assert platform.device_of(platform.dropout(x, 0.5, 0, 0, Region.whole((2, 3)))) == "meta"


def test_a_forward_for_the_first_time_is_no_recomputation(platform, device):
    assert platform.is_recomputing() is False
    stream = default_random_stream()
    with stream.at(stream.get_state()):
        assert platform.is_recomputing() is True
    assert platform.is_recomputing() is False
