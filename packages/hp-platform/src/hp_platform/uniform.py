"""Uniform floats out of random words, the same on every framework and device.

All arithmetic is in float64 with one product and one sum, each rounded once by IEEE rules everywhere, and then one
rounding to the dtype asked for.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hp_platform.protocols.tensor import DType, Tensor

if TYPE_CHECKING:
    from hp_platform.protocols import RandomOps, TensorOps

    class _TensorsAndWords(TensorOps, RandomOps):
        """What of the platform is used here."""


_FORMATS = {"float64": (53, -1022), "float32": (24, -126), "float16": (11, -14), "bfloat16": (8, -126)}
"""Binary digits of the significand, and the exponent of the smallest normal number."""


def uniform(
    platform: _TensorsAndWords,
    shape: tuple[int, ...],
    low: float,
    high: float,
    *,
    seed: int,
    dtype: DType | None = None,
    device: str = "cpu",
) -> Tensor:
    """Numbers in ``[low, high)`` of the given shape and dtype (default float32) from the words of ``(seed, stream 0)``.

    Element ``i`` in row-major order is ``low + (high - low) * u``. ``u`` has 24 binary digits, from word ``i``; for float64 it
    has 53, from words ``2 i`` (its upper 27) and ``2 i + 1`` (the lower 26). What rounding would lift to ``high`` becomes the
    largest number below it. ValueError for an empty or infinite interval, or another dtype than float64, float32, float16
    and bfloat16.
    """
    dtype = platform.dtype("float32" if dtype is None else dtype)
    name = platform.dtype_name(dtype)
    if name not in _FORMATS:
        raise ValueError(
            f"uniform numbers of dtype {name}: choose one of {', '.join(_FORMATS)} and cast the result"
        )
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"uniform numbers in [{low}, {high}): needs finite low < high")
    count = math.prod(shape)
    if name == "float64":
        words = platform.reshape(platform.random_bits(seed, 0, 0, 2 * count, device), (count, 2))
        # split rather than index: MindSpore gives a copy for an indexed column, torch a view; both are right here.
        upper, lower = platform.split(words, (1, 1), 1)
        digits, scale = (upper >> 5) * 2**26 + (lower >> 6), 2.0**-53
    else:
        digits, scale = platform.random_bits(seed, 0, 0, count, device) >> 8, 2.0**-24
    unit = platform.cast(digits, platform.dtype("float64")) * scale
    numbers = platform.cast(unit * (high - low) + low, dtype)
    limit = platform.full((), largest_below(high, name), dtype, device)
    return platform.reshape(platform.where(numbers < high, numbers, limit), shape)


def largest_below(value: float, dtype: str) -> float:
    """The largest number below ``value`` that a floating dtype has."""
    digits, min_exponent = _FORMATS[dtype]
    fraction, exponent = math.frexp(value)  # value = fraction * 2**exponent, 0.5 <= |fraction| < 1
    if fraction == 0.5:
        exponent = exponent - 1  # just below a power of two numbers lie twice as close
    if fraction == 0.0 or exponent <= min_exponent:
        exponent = min_exponent + 1  # subnormal numbers lie equally close
    spacing = math.ldexp(1.0, exponent - digits)
    return (math.ceil(value / spacing) - 1) * spacing
