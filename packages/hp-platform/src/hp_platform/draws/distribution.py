"""Which values are made of random words, and how: a fixed, documented way for every kind.

Element ``i`` (row-major, in the whole tensor) of a draw uses these words of the Philox sequence:

===========  ============================  =====================================================================
kind         words                         value
===========  ============================  =====================================================================
word         ``i``                         the word
event        ``i``                         bool: ``w < ceil(p * 2**32)``
long         ``2 i, 2 i + 1``              63 bits: ``(w0 >> 1) * 2**32 + w1``
integer      ``2 i, 2 i + 1``              ``low + long % (high - low)``; no value is likelier by more than ``(high - low) / 2**63``
uniform      ``i``                         float32: ``u = (w >> 8) / 2**24``
             ``2 i, 2 i + 1``              float64: ``u = ((w0 >> 5) * 2**26 + (w1 >> 6)) / 2**53``
normal       ``j, j + 1``, j = i - i % 2   float32: Box-Muller, ``sqrt(-2 log((w0 + 1) / 2**32))`` times the cosine (even
                                           i) or sine (odd i) of ``w1 / 2**32`` turns
             four from ``4 (i // 2)``      float64: the same with the 53 bits of each pair for a word
exponential  as uniform                    ``-log``, float32: ``(w + 1) / 2**32``; float64: ``(53 bits + 1) / 2**53``
truncated    ``2 i, 2 i + 1``              the normal quantile of a uniform number between two probabilities
===========  ============================  =====================================================================

All arithmetic is in float64 (:mod:`hp_platform.draws.elementary`); ``shift + scale * value`` is rounded once. Numbers of
half precision are float32 ones, rounded again.
Sources: Salmon et al., SC 2011 (words); Box and Muller, 1958.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hp_platform.uniform import largest_below


@dataclass(frozen=True)
class Distribution:
    """What is drawn; made by the class methods."""

    kind: str
    result: str
    """Name of the dtype that values have in the end."""
    shift: float = 0.0
    scale: float = 1.0
    largest: float = math.inf
    """What would be greater becomes this: the largest number of the dtype below an open end."""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    probabilities: tuple[float, float] = (0.0, 1.0)
    threshold: int = 0
    """Words below it are events; of integers, how many values there are."""

    @property
    def dtype(self) -> str:
        """Name of the dtype that values are rounded to first: int64, bool, float32 or float64."""
        if self.kind == "integer":
            return "int64"
        return "float32" if self.result in _HALVES else self.result

    @property
    def is_whole(self) -> bool:
        """Whether integer arithmetic is enough."""
        return self.kind in ("word", "long", "integer", "event")

    @property
    def per_block(self) -> int:
        """Elements that one block of four words makes."""
        return 2 if self.dtype == "float64" or self.kind in ("long", "integer", "truncated") else 4

    @classmethod
    def words(cls) -> Distribution:
        """Whole numbers in ``[0, 2**32)``, int64."""
        return cls("word", "int64")

    @classmethod
    def longs(cls) -> Distribution:
        """Whole numbers in ``[0, 2**63)``, int64."""
        return cls("long", "int64")

    @classmethod
    def integers(cls, low: int, high: int, dtype: str) -> Distribution:
        """Whole numbers in ``[low, high)`` in any numeric dtype. ValueError for none, for too many, and for what int64 lacks."""
        if not (-(2**63) <= low < high <= 2**63 and high - low < 2**63):
            raise ValueError(
                f"whole numbers in [{low}, {high}): needs low < high, both in int64 and less than 2**63 apart"
            )
        return cls("integer", dtype, shift=low, threshold=high - low)

    @classmethod
    def event(cls, p: float) -> Distribution:
        """True with probability ``p``, a multiple of ``2**-32`` (rounded up). ValueError outside of 0 to 1."""
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"a probability lies between 0 and 1, got {p}")
        return cls("event", "bool", threshold=math.ceil(p * 2**32))

    @classmethod
    def uniform(cls, low: float, high: float, dtype: str) -> Distribution:
        """Uniform in ``[low, high)``; only ``low`` where both are equal. ValueError unless both are finite and ordered."""
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ValueError(f"uniform numbers in [{low}, {high}): needs finite low <= high")
        largest = largest_below(high, _real(dtype)) if low < high else low
        return cls("uniform", dtype, low, high - low, largest)

    @classmethod
    def normal(cls, mean: float, std: float, dtype: str) -> Distribution:
        """Normal. ValueError for a negative or infinite ``std``."""
        if not (math.isfinite(mean) and math.isfinite(std) and std >= 0):
            raise ValueError(
                f"normal numbers of mean {mean} and std {std}: needs finite numbers, std 0 or more"
            )
        return cls("normal", _real(dtype), mean, std)

    @classmethod
    def exponential(cls, rate: float, dtype: str) -> Distribution:
        """Exponential with mean ``1 / rate``. ValueError unless the rate is positive."""
        if not 0.0 < rate < math.inf:
            raise ValueError(f"exponential numbers of rate {rate}: needs a finite rate above 0")
        return cls("exponential", _real(dtype), 0.0, 1.0 / rate)

    @classmethod
    def truncated(cls, mean: float, std: float, low: float, high: float, dtype: str) -> Distribution:
        """Normal, conditioned to ``[low, high]``. ValueError unless ``low < high`` and ``std > 0``, and such numbers exist."""
        if not (low < high and math.isfinite(mean) and 0.0 < std < math.inf):
            raise ValueError(
                f"normal numbers of mean {mean} and std {std} in [{low}, {high}]: needs low < high and std above 0"
            )
        lower, upper = (0.5 * math.erfc((mean - bound) / (std * math.sqrt(2.0))) for bound in (low, high))
        if not lower < upper:
            raise ValueError(
                f"a normal number of mean {mean} and std {std} does not lie in [{low}, {high}]: choose bounds nearer to the mean"
            )
        return cls("truncated", _real(dtype), mean, std, bounds=(low, high), probabilities=(lower, upper))


_HALVES = frozenset({"float16", "bfloat16"})


def _real(dtype: str) -> str:
    if dtype not in {"float32", "float64", *_HALVES}:
        raise ValueError(
            f"random numbers of dtype {dtype}: choose float64, float32, float16 or bfloat16, or draw whole numbers with randint"
        )
    return dtype
