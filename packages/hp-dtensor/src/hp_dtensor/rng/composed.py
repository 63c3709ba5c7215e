"""Random values that are computed from uniform, normal and exponential ones, element by element, in float64.

As the draws that they are made of they depend on seed, operation and global index alone. The last digit may depend on the
device, whose logarithm, exponential and sine are used. None communicates.
"""

from __future__ import annotations

import math
from typing import Any

from hp_dtensor.rng.places import Generator, Tensor, is_dtensor, place_of, refuse_partial, wrapped_as
from hp_dtensor.rng.writing import Values, drawn, write_values
from hp_platform import get_platform
from hp_platform.draws import Distribution, Region


def cauchy_(x: Tensor, median: float = 0.0, sigma: float = 1.0, *, generator: Generator = None) -> Tensor:
    """Write Cauchy numbers ``median + sigma * tan(pi * (u - 1/2))`` into ``x``, a floating DTensor or plain tensor. Returns it.

    ValueError for a Partial and unless ``sigma > 0``.
    """
    return _write(x, cauchy(median, sigma), generator, "cauchy_")


def log_normal_(x: Tensor, mean: float = 1.0, std: float = 2.0, *, generator: Generator = None) -> Tensor:
    """Write ``exp(n)`` of normal numbers ``n`` of this mean and deviation into ``x``; see :func:`cauchy_`."""
    return _write(x, log_normal(mean, std), generator, "log_normal_")


def geometric_(x: Tensor, p: float, *, generator: Generator = None) -> Tensor:
    """Write how many trials of probability ``p`` it takes until one succeeds (1, 2, ...) into ``x`` of any dtype.

    The exponential number of rate ``-log(1 - p)``, rounded up. ValueError unless ``0 < p < 1``.
    """
    return _write(x, geometric(p), generator, "geometric_")


def poisson(rates: Tensor, *, generator: Generator = None) -> Tensor:
    """How many events happen where ``rates`` are expected, for each element; shape, dtype and placements of ``rates``.

    By the inverse of the distribution function at a uniform number of 53 bits. ValueError for a Partial, and for rates below 0
    or above 500, whose probabilities leave float64: add up draws of smaller rates. The host waits for the device.
    """
    local, region = place_of(rates)
    if is_dtensor(rates):
        refuse_partial(rates._spec, "poisson of")
    return wrapped_as(rates, poisson_of(local, region, generator))


# ------------------------------------------------------------------------------------------------------------ the values
def cauchy(median: float = 0.0, sigma: float = 1.0) -> Values:
    """See :func:`cauchy_`."""
    if not (math.isfinite(median) and 0.0 < sigma < math.inf):
        raise ValueError(f"Cauchy numbers of median {median} and sigma {sigma}: needs a finite sigma above 0")

    def values(region: Region, device: str, generator: Generator) -> Tensor:
        platform = get_platform()
        u = drawn(Distribution.uniform(0.0, 1.0, "float64"), region, device, generator)
        angle = (u - 0.5) * math.pi
        return platform.sin(angle) / platform.cos(angle) * sigma + median

    return values


def log_normal(mean: float = 1.0, std: float = 2.0) -> Values:
    """See :func:`log_normal_`."""
    normal = Distribution.normal(mean, std, "float64")
    return lambda region, device, generator: get_platform().exp(drawn(normal, region, device, generator))


def geometric(p: float) -> Values:
    """See :func:`geometric_`."""
    if not 0.0 < p < 1.0:
        raise ValueError(f"the probability of a geometric number lies between 0 and 1, got {p}")
    waiting = Distribution.exponential(-math.log1p(-p), "float64")

    def values(region: Region, device: str, generator: Generator) -> Tensor:
        platform = get_platform()
        trials = -((-drawn(waiting, region, device, generator)) // 1)
        return platform.where(trials < 1, platform.zeros_like(trials) + 1, trials)

    return values


_HIGHEST_RATE = 500.0


def poisson_of(local: Tensor, region: Region, generator: Generator) -> Tensor:
    """See :func:`poisson`; for the piece of one rank."""
    platform = get_platform()
    device = platform.device_of(local)
    if device == "meta":
        return platform.empty(region.size, local.dtype, device)
    with platform.no_grad():
        rates = platform.cast(platform.detach(local), "float64")
        highest = _most(rates)
        if not (_most(-rates) <= 0.0 and highest <= _HIGHEST_RATE):
            raise ValueError(
                f"the rates of poisson lie between 0 and {_HIGHEST_RATE:.0f}, but not all of these do"
            )
        u = drawn(Distribution.uniform(0.0, 1.0, "float64"), region, device, generator)
        probability = platform.exp(-rates)
        below, count, k = probability, platform.zeros_like(rates), 0
        last = highest + 20.0 * math.sqrt(highest) + 60.0  # what lies beyond has no probability in float64
        while k < last:
            is_above = u >= below
            k = k + 1
            if k % 8 == 0 and _most(platform.cast(is_above, "float64")) == 0.0:
                break
            count = count + platform.cast(is_above, "float64")
            probability = probability * rates / k
            below = below + probability
        return platform.cast(count, local.dtype)


def _most(x: Tensor) -> float:
    """The largest number, 0 of none; NaN where there is one."""
    values = get_platform().to_numpy(x)
    return float(values.max()) if values.size else 0.0


def _write(x: Tensor, values: Values, generator: Generator, name: str) -> Tensor:
    local, region = place_of(x)
    if is_dtensor(x):
        refuse_partial(x._spec, f"{name} of")
    write_values(local, region, values, generator)
    return x


# --------------------------------------------------------------------------------------------------------------- dropout
_SATURATION = 1.6732632423543772 * 1.0507009873554805
"""Minus what SELU gives for a number far below 0. Source: Klambauer et al., 2017."""


def alpha_dropped(local: Any, factors: Any, p: float) -> Tensor:
    """Where ``factors`` is 0 the saturation value of SELU, elsewhere ``local``, shifted and scaled to keep mean and variance."""
    platform = get_platform()
    if p == 1.0:
        return local * platform.zeros_like(factors)
    a = 1.0 / math.sqrt((_SATURATION**2 * p + 1.0) * (1.0 - p))
    kept = platform.cast(factors > 0, local.dtype)
    return local * (kept * a) + (kept - 1.0) * (_SATURATION * a) + _SATURATION * a * p
