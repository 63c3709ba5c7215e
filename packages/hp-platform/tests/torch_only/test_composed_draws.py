"""Draws composed of torch's operations, as devices without a kernel of ours run them, against numpy's."""

import pytest
import torch

from hp_platform.draws import Distribution, Region
from hp_platform.draws.host_arrays import draw_on_host
from hp_platform.torch._draws import draw_on_device

REGIONS = [
    Region.whole((13,)),
    Region((6, 7), (1, 2), (4, 5)),
    Region((4, 3), (4, 0), (0, 3)),
    Region.whole(()),
]
DISTRIBUTIONS = [
    Distribution.words(),
    Distribution.longs(),
    Distribution.event(0.3),
    *(Distribution.uniform(-1.0, 2.0, dtype) for dtype in ("float32", "float64", "float16")),
    *(Distribution.normal(0.5, 2.0, dtype) for dtype in ("float32", "float64", "float16")),
    *(Distribution.exponential(2.0, dtype) for dtype in ("float32", "float64")),
    *(Distribution.truncated(0.0, 1.0, -1.0, 2.0, dtype) for dtype in ("float32", "float64")),
]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda d: f"{d.kind}-{d.result}")
def test_composed_draws_are_those_of_the_host(distribution):
    for region in REGIONS:
        composed = draw_on_device(distribution, 2**40 + 3, 2**33 + 1, region, "cpu")
        expected = torch.from_numpy(draw_on_host(distribution, 2**40 + 3, 2**33 + 1, region))
        assert torch.equal(composed, expected)
        assert composed.shape == expected.shape
