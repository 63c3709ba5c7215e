"""Random values written into tensors, and new tensors of them: each rank draws the elements that it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.rng.places import Generator, take
from hp_platform import get_platform
from hp_platform.draws import Distribution, Region

Tensor = Any
OfDtype = Callable[[str], Distribution]
"""The distribution for the dtype of a tensor."""
Values = Callable[[Region, str, Generator], Tensor]
"""Makes the values of a region on a device, in any dtype that holds them."""


def drawn(distribution: Distribution, region: Region, device: str, generator: Generator) -> Tensor:
    """A new local tensor. On the meta device nothing is drawn, so the stream stays."""
    platform = get_platform()
    if device == "meta":
        return platform.empty(region.size, distribution.result, device)
    place = take(generator)
    return platform.draw(distribution, place.seed, place.number, region, device)


def write(local: Tensor, region: Region, distribution: OfDtype, generator: Generator) -> Tensor:
    """Fill a local tensor with a distribution's numbers in its dtype; see :func:`write_values`."""
    of_dtype = distribution(get_platform().dtype_name(local.dtype))

    def values(region: Region, device: str, generator: Generator) -> Tensor:
        return drawn(of_dtype, region, device, generator)

    return write_values(local, region, values, generator)


def write_values(local: Tensor, region: Region, values: Values, generator: Generator) -> Tensor:
    """Fill a local tensor, outside of the graph. Returns it. RuntimeError for a tensor that backward needs as it is."""
    platform = get_platform()
    if platform.requires_grad(local) and not platform.is_leaf(local) and platform.is_grad_enabled():
        raise RuntimeError(
            "random values written into a tensor that operations have made, and that requires grad, would leave it with the "
            "gradient of what it was: write into a leaf, or under no_grad()"
        )
    device = platform.device_of(local)
    if device != "meta":
        platform.copy_(local, platform.cast(values(region, device, generator), local.dtype))
    return local


def with_probabilities(p: Tensor, region: Region, generator: Generator) -> Tensor:
    """1 where a word is below the element's own probability, else 0, in the dtype of ``p``."""
    platform = get_platform()
    device = platform.device_of(p)
    if device == "meta":
        return platform.empty(region.size, p.dtype, device)
    with platform.no_grad():
        # Exact: products with a power of two, and whole numbers below 2**53.
        words = platform.cast(drawn(Distribution.words(), region, device, generator), "float64")
        return platform.cast(words < platform.cast(platform.detach(p), "float64") * 2.0**32, p.dtype)
