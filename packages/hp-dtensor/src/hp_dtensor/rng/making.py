"""New tensors of random values: plain ones of a size, and others like a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor.rng.places import (
    Generator,
    Tensor,
    is_dtensor,
    place_of,
    refuse_partial,
    region_of,
    whole_placements,
    wrapped_as,
)
from hp_dtensor.rng.writing import OfDtype, drawn, with_probabilities
from hp_dtensor.spec import make_spec
from hp_platform import get_platform
from hp_platform.draws import Distribution, Region


def rand(
    *size: Any,
    dtype: Any = None,
    device: str | None = None,
    requires_grad: bool = False,
    generator: Generator = None,
) -> Tensor:
    """Uniform in ``[0, 1)``, a plain tensor. ``size``: ints or one sequence; default dtype float32."""
    return _new(
        size, lambda name: Distribution.uniform(0.0, 1.0, name), dtype, device, requires_grad, generator
    )


def randn(
    *size: Any,
    dtype: Any = None,
    device: str | None = None,
    requires_grad: bool = False,
    generator: Generator = None,
) -> Tensor:
    """Standard normal, a plain tensor. ``size``: ints or one sequence; default dtype float32."""
    return _new(
        size, lambda name: Distribution.normal(0.0, 1.0, name), dtype, device, requires_grad, generator
    )


def randint(
    low: int,
    high: int,
    size: Any,
    *,
    dtype: Any = "int64",
    device: str | None = None,
    generator: Generator = None,
) -> Tensor:
    """Whole numbers in ``[low, high)``, a plain tensor of shape ``size``; default dtype int64."""
    return _new((size,), lambda name: Distribution.integers(low, high, name), dtype, device, False, generator)


def rand_like(
    x: Tensor, *, dtype: Any = None, requires_grad: bool = False, generator: Generator = None
) -> Tensor:
    """Uniform in ``[0, 1)`` with shape, placements, device and (unless given) dtype of ``x``; where ``x`` is Partial: Replicate."""
    return _like(x, lambda name: Distribution.uniform(0.0, 1.0, name), dtype, requires_grad, generator)


def randn_like(
    x: Tensor, *, dtype: Any = None, requires_grad: bool = False, generator: Generator = None
) -> Tensor:
    """Standard normal, otherwise as :func:`rand_like`."""
    return _like(x, lambda name: Distribution.normal(0.0, 1.0, name), dtype, requires_grad, generator)


def randint_like(
    x: Tensor, low: int, high: int | None = None, *, dtype: Any = None, generator: Generator = None
) -> Tensor:
    """Whole numbers in ``[low, high)``, or in ``[0, low)``, otherwise as :func:`rand_like`."""
    low, high = (0, low) if high is None else (low, high)
    return _like(x, lambda name: Distribution.integers(low, high, name), dtype, False, generator)


def bernoulli(p: Tensor, *, generator: Generator = None) -> Tensor:
    """1 with the probability that ``p`` holds for each element, else 0; placed as ``p``, which must not be Partial."""
    local, region = place_of(p)
    if is_dtensor(p):
        refuse_partial(p._spec, "bernoulli of")
    return wrapped_as(p, with_probabilities(local, region, generator))


def size_of(size: tuple[Any, ...]) -> tuple[int, ...]:
    """A size that is given as ints or as one sequence. ValueError for anything else."""
    given = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    if isinstance(given, str) or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in given):
        raise ValueError(f"a size is whole numbers of 0 or more, or one sequence of them; got {size!r}")
    return tuple(given)


def _new(
    size: tuple[Any, ...],
    distribution: OfDtype,
    dtype: Any,
    device: str | None,
    requires_grad: bool,
    generator: Generator,
) -> Tensor:
    platform = get_platform()
    shape = size_of(size)
    name = "float32" if dtype is None else platform.dtype_name(dtype)
    made = drawn(distribution(name), Region.whole(shape), "cpu" if device is None else str(device), generator)
    return platform.set_requires_grad_(made, True) if requires_grad else made


def _like(x: Tensor, distribution: OfDtype, dtype: Any, requires_grad: bool, generator: Generator) -> Tensor:
    platform = get_platform()
    local, region = place_of(x)
    spec = None
    if is_dtensor(x):
        spec = make_spec(x._spec.mesh, whole_placements(x._spec), x._spec.shape)
        region = region_of(spec)
    name = platform.dtype_name(local.dtype if dtype is None else dtype)
    made = drawn(distribution(name), region, platform.device_of(local), generator)
    made = platform.set_requires_grad_(made, True) if requires_grad else made
    return made if spec is None else x._wrap(made, spec)
