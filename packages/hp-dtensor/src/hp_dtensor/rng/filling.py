"""Random values written into tensors, and the usual initialisers of weights."""

from __future__ import annotations

import math

from hp_dtensor.rng.places import Generator, Tensor, is_dtensor, place_of, refuse_partial
from hp_dtensor.rng.writing import OfDtype, write
from hp_platform.draws import Distribution


def uniform_(x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: Generator = None) -> Tensor:
    """Write uniform numbers in ``[low, high)`` into ``x``. Returns ``x``.

    ``x``: DTensor or plain, also a leaf that requires grad. ValueError for a Partial, an integer dtype or ``low > high``.
    """
    return _write(x, lambda name: Distribution.uniform(low, high, name), generator, "uniform_")


def normal_(x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Generator = None) -> Tensor:
    """Write normal numbers into ``x``. Returns ``x``; see :func:`uniform_`. Formula: Box-Muller, in :mod:`hp_platform.draws`."""
    return _write(x, lambda name: Distribution.normal(mean, std, name), generator, "normal_")


def trunc_normal_(
    x: Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    *,
    generator: Generator = None,
) -> Tensor:
    """Write normal numbers that are conditioned to ``[a, b]`` (bounds of the values) into ``x``; see :func:`uniform_`.

    By the normal quantile of a uniform number (Wichura, AS 241), equal everywhere; torch.nn.init.trunc_normal_ goes through
    the framework's own ``erfinv``, so its last digits depend on the device.
    """
    return _write(x, lambda name: Distribution.truncated(mean, std, a, b, name), generator, "trunc_normal_")


def exponential_(x: Tensor, lambd: float = 1.0, *, generator: Generator = None) -> Tensor:
    """Write exponential numbers of mean ``1 / lambd`` into ``x``; see :func:`uniform_`."""
    return _write(x, lambda name: Distribution.exponential(lambd, name), generator, "exponential_")


def bernoulli_(x: Tensor, p: float = 0.5, *, generator: Generator = None) -> Tensor:
    """Write 1 with probability ``p``, else 0, into ``x`` of any dtype; see :func:`uniform_`."""
    return _write(x, lambda name: Distribution.event(p), generator, "bernoulli_")


def random_(x: Tensor, low: int = 0, high: int | None = None, *, generator: Generator = None) -> Tensor:
    """Write whole numbers in ``[low, high)`` into ``x`` of any dtype; see :func:`uniform_`.

    Without ``high``: up to the largest number of an integer dtype, and to ``2**digits`` for floating ones, inclusive.
    """
    return _write(x, whole_numbers(low, high), generator, "random_")


def kaiming_uniform_(
    x: Tensor,
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    *,
    generator: Generator = None,
) -> Tensor:
    """Write uniform numbers of variance ``gain**2 / fan`` into ``x``, the fan of its global shape. Source: He et al., 2015."""
    bound = math.sqrt(3.0) * _kaiming_std(x, a, mode, nonlinearity)
    return uniform_(x, -bound, bound, generator=generator)


def kaiming_normal_(
    x: Tensor,
    a: float = 0.0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    *,
    generator: Generator = None,
) -> Tensor:
    """Write normal numbers of variance ``gain**2 / fan`` into ``x``, the fan of its global shape. Source: He et al., 2015."""
    return normal_(x, 0.0, _kaiming_std(x, a, mode, nonlinearity), generator=generator)


def xavier_uniform_(x: Tensor, gain: float = 1.0, *, generator: Generator = None) -> Tensor:
    """Write uniform numbers of variance ``2 gain**2 / (fan_in + fan_out)``. Source: Glorot and Bengio, 2010."""
    bound = math.sqrt(3.0) * gain * math.sqrt(2.0 / max(sum(_fans(x)), 1))
    return uniform_(x, -bound, bound, generator=generator)


def xavier_normal_(x: Tensor, gain: float = 1.0, *, generator: Generator = None) -> Tensor:
    """Write normal numbers of variance ``2 gain**2 / (fan_in + fan_out)``. Source: Glorot and Bengio, 2010."""
    return normal_(x, 0.0, gain * math.sqrt(2.0 / max(sum(_fans(x)), 1)), generator=generator)


def _write(x: Tensor, distribution: OfDtype, generator: Generator, name: str) -> Tensor:
    local, region = place_of(x)
    if is_dtensor(x):
        refuse_partial(x._spec, f"{name} of")
    write(local, region, distribution, generator)
    return x


def whole_numbers(low: int, high: int | None) -> OfDtype:
    """Whole numbers in ``[low, high)``; without ``high`` to what the dtype can count."""
    return lambda name: Distribution.integers(low, _end(name) if high is None else high, name)


def _end(dtype: str) -> int:
    """One past the largest number that ``random_()`` writes into a dtype."""
    if dtype == "bool":
        return 2
    if dtype in _DIGITS:
        return 2 ** _DIGITS[dtype] + 1
    bits = int(dtype.lstrip("uint"))
    # 63 bits are drawn, so the very largest int64 is left out.
    return min(2 ** (bits - (0 if dtype.startswith("u") else 1)), 2**63 - 1)


_DIGITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}


def _fans(x: Tensor) -> tuple[int, int]:
    shape = tuple(x.shape)
    if len(shape) < 2:
        raise ValueError(f"fans need a weight with at least 2 dims (out, in, ...), got shape {shape}")
    field = math.prod(shape[2:])
    return shape[1] * field, shape[0] * field


def _kaiming_std(x: Tensor, a: float, mode: str, nonlinearity: str) -> float:
    fans = dict(zip(("fan_in", "fan_out"), _fans(x), strict=True))
    if mode.lower() not in fans:
        raise ValueError(f"mode must be 'fan_in' or 'fan_out', got {mode!r}")
    return _gain(nonlinearity, a) / math.sqrt(max(fans[mode.lower()], 1))  # 1: of a weight without elements


def _gain(nonlinearity: str, a: float) -> float:
    """By how much the values of a layer shrink behind the nonlinearity; the numbers that torch.nn.init uses."""
    gains = {"linear": 1.0, "sigmoid": 1.0, "tanh": 5.0 / 3, "relu": math.sqrt(2.0), "selu": 0.75}
    if nonlinearity == "leaky_relu":
        return math.sqrt(2.0 / (1 + a**2))
    if nonlinearity not in gains:
        raise ValueError(f"nonlinearity must be one of leaky_relu, {', '.join(gains)}; got {nonlinearity!r}")
    return gains[nonlinearity]
