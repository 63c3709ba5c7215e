"""Regions, the arithmetic of draws against the standard library, and whether the values look like their distribution."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_platform.draws import Distribution, Region
from hp_platform.draws.elementary import TERMS, cos_and_sin, log, normal_quantile
from hp_platform.draws.host_arrays import HostArrays, draw_on_host

pytestmark = pytest.mark.once
XP = HostArrays()
COUNT = 100_000
SHAPE = (COUNT,)


@given(st.data())
def test_the_runs_of_a_region_are_the_indices_of_its_elements(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=4)))
    offset = tuple(data.draw(st.integers(0, n)) for n in shape)
    size = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))
    region = Region(shape, offset, size)
    runs = region.runs()
    found = runs.starts(0, runs.count)[:, None] + np.arange(runs.length)
    cut = tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))
    expected = np.arange(math.prod(shape)).reshape(shape)[cut]
    assert found.reshape(-1).tolist() == expected.reshape(-1).tolist()


@pytest.mark.parametrize(
    ("shape", "offset", "size"), [((3,), (2,), (2,)), ((3,), (-1,), (2,)), ((3, 2), (0,), (3,))]
)
def test_a_block_outside_of_its_tensor_is_refused(shape, offset, size):
    with pytest.raises(ValueError, match="does not lie in"):
        Region(shape, offset, size)


@pytest.mark.parametrize("name", ["words", "longs"])
def test_a_region_of_many_pieces_is_one_sequence(name):
    distribution = getattr(Distribution, name)()
    whole = draw_on_host(distribution, 1, 2, Region.whole((200_000,)))
    for shape, offset, size in (((200_000,), (77_777,), (100_001,)), ((400, 500), (3, 1), (390, 498))):
        cut = tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))
        part = draw_on_host(distribution, 1, 2, Region(shape, offset, size))
        np.testing.assert_array_equal(part, whole.reshape(shape)[cut])


@pytest.mark.parametrize(("dtype", "digits", "limit"), [("float32", 32, 2e-10), ("float64", 53, 1e-15)])
def test_logarithm_sine_and_cosine_are_those_of_the_standard_library(dtype, digits, limit):
    generator = np.random.default_rng(0)
    n = np.concatenate([generator.integers(1, 2**digits, 20_000), [1, 2, 2 ** (digits - 1), 2**digits - 1]])
    got = log(XP, n.astype(np.float64), TERMS[dtype], digits)
    expected = [math.log1p((int(i) - 2**digits) / 2**digits) for i in n]
    np.testing.assert_allclose(got, expected, rtol=limit)
    cos, sin = cos_and_sin(XP, n, digits, TERMS[dtype])
    turns = n * 2.0**-digits * 2 * math.pi
    np.testing.assert_allclose(cos, np.cos(turns), rtol=0, atol=limit)
    np.testing.assert_allclose(sin, np.sin(turns), rtol=0, atol=limit)


def test_quarters_of_a_turn_are_exact():
    cos, sin = cos_and_sin(XP, np.arange(4) * 2**30, 32, TERMS["float32"])
    assert (cos + 0.0).tolist() == [1, 0, -1, 0]
    assert (sin + 0.0).tolist() == [0, 1, 0, -1]


def test_the_quantile_is_that_of_the_standard_library():
    generator = np.random.default_rng(0)
    p = np.concatenate([generator.random(2000), 10.0 ** (-280 * generator.random(500)), [0.5, 0.075, 0.925]])
    expected = [statistics.NormalDist().inv_cdf(float(x)) for x in p]
    np.testing.assert_allclose(normal_quantile(XP, p), expected, rtol=2e-15, atol=1e-300)


def _distance(values, cdf) -> float:
    """The statistic of Kolmogorov and Smirnov, times the root of the count: above 1.95 once in a thousand samples."""
    ordered = np.sort(values.astype(np.float64))
    expected = np.array([cdf(float(x)) for x in ordered])
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return float(max((steps[1:] - expected).max(), (expected - steps[:-1]).max()) * math.sqrt(len(ordered)))


_NORMAL = statistics.NormalDist()
_SHARE = _NORMAL.cdf(2) - _NORMAL.cdf(-1)
LOOKS = {
    "uniform": (Distribution.uniform(-1, 3, "float32"), lambda x: (x + 1) / 4),
    "uniform float64": (Distribution.uniform(-1, 3, "float64"), lambda x: (x + 1) / 4),
    "normal": (Distribution.normal(1, 2, "float32"), statistics.NormalDist(1, 2).cdf),
    "normal float64": (Distribution.normal(1, 2, "float64"), statistics.NormalDist(1, 2).cdf),
    "exponential": (Distribution.exponential(2, "float32"), lambda x: 1 - math.exp(-2 * x)),
    "truncated": (
        Distribution.truncated(0, 1, -1, 2, "float32"),
        lambda x: (_NORMAL.cdf(x) - _NORMAL.cdf(-1)) / _SHARE,
    ),
}


@pytest.mark.parametrize("name", LOOKS)
def test_values_look_like_their_distribution(name):
    distribution, cdf = LOOKS[name]
    values = draw_on_host(distribution, 5, 6, Region.whole(SHAPE))
    assert _distance(values, cdf) < 1.95
    # Neighbours, and the same elements of the next operation and of the next seed, have nothing to do with each other.
    others = [draw_on_host(distribution, s, o, Region.whole(SHAPE)) for s, o in ((5, 7), (6, 6))]
    for a, b in ((values[::2], values[1::2]), *((values, other) for other in others)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(len(a))


def test_events_happen_with_their_probability():
    for p in (0.0, 0.1, 0.5, 1.0):
        share = draw_on_host(Distribution.event(p), 1, 1, Region.whole(SHAPE)).mean()
        assert abs(share - p) <= 4 * math.sqrt(p * (1 - p) / COUNT)


def test_whole_numbers_are_as_likely_as_each_other():
    values = draw_on_host(Distribution.integers(-2, 5, "int64"), 1, 1, Region.whole(SHAPE))
    shares = np.bincount(values + 2) / COUNT
    assert len(shares) == 7
    assert np.abs(shares - 1 / 7).max() < 4 * math.sqrt(1 / 7 / COUNT)


def test_bounds_are_kept():
    values = draw_on_host(Distribution.truncated(0, 1, 1.5, 1.75, "float32"), 1, 1, Region.whole(SHAPE))
    assert values.min() >= 1.5
    assert values.max() <= 1.75
    values = draw_on_host(Distribution.uniform(1, 1 + 2.0**-20, "float32"), 1, 1, Region.whole(SHAPE))
    assert set(values.tolist()) == {1 + i * 2.0**-23 for i in range(8)}
    assert draw_on_host(Distribution.uniform(2, 2, "float32"), 1, 1, Region.whole((3,))).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Distribution.uniform(1, 0, "float32"), "low <= high"),
        (lambda: Distribution.uniform(0, math.inf, "float32"), "finite"),
        (lambda: Distribution.uniform(0, 1, "int64"), "randint"),
        (lambda: Distribution.normal(0, -1, "float32"), "std 0 or more"),
        (lambda: Distribution.normal(math.nan, 1, "float32"), "finite"),
        (lambda: Distribution.integers(3, 3, "int64"), "low < high"),
        (lambda: Distribution.integers(-(2**63), 2**63, "int64"), "2\\*\\*63 apart"),
        (lambda: Distribution.event(1.5), "between 0 and 1"),
        (lambda: Distribution.event(math.nan), "between 0 and 1"),
        (lambda: Distribution.exponential(0, "float32"), "above 0"),
        (lambda: Distribution.truncated(0, 1, 2, -2, "float32"), "low < high"),
        (lambda: Distribution.truncated(0, 1, 50, 60, "float32"), "nearer to the mean"),
    ],
)
def test_distributions_that_do_not_exist_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
