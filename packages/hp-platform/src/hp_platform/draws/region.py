"""Which elements of a tensor are drawn: a block of it, by the row-major indices that its elements have in the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy


@dataclass(frozen=True)
class Region:
    """The block of ``size`` that begins at ``offset`` in a tensor of ``shape``. ValueError unless it lies inside."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]

    def __post_init__(self) -> None:
        fits = len(self.shape) == len(self.offset) == len(self.size) and all(
            o >= 0 and s >= 0 and o + s <= n
            for n, o, s in zip(self.shape, self.offset, self.size, strict=True)
        )
        if not fits:
            raise ValueError(
                f"a block of size {self.size} at offset {self.offset} does not lie in a tensor of shape {self.shape}"
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """All of a tensor."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """How many elements are drawn."""
        return math.prod(self.size)

    def runs(self) -> Runs:
        """The elements as runs of consecutive indices."""
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        base = sum(o * stride for o, stride in zip(self.offset, strides, strict=True))
        if 0 in self.size:
            return Runs(base, 0, ((0, 0),))
        length = 1
        outer: list[tuple[int, int]] = []
        joins = True  # while the dims so far are whole, the next one goes on without a gap
        for n, size, stride in zip(reversed(self.shape), reversed(self.size), reversed(strides), strict=True):
            if joins:
                length, joins = length * size, size == n
            elif outer and outer[-1][0] * outer[-1][1] == stride:
                outer[-1] = (outer[-1][0] * size, outer[-1][1])
            elif size > 1:
                outer.append((size, stride))
        return Runs(base, length, tuple(reversed(outer)))


@dataclass(frozen=True)
class Runs:
    """Runs of ``length`` consecutive indices, laid out by nested steps."""

    base: int
    """Index of the first element."""
    length: int
    outer: tuple[tuple[int, int], ...]
    """Count and distance of each level of steps, the outermost first."""

    @property
    def count(self) -> int:
        """How many runs there are."""
        return math.prod(count for count, _ in self.outer)

    def starts(self, first: int, last: int) -> numpy.ndarray[Any, numpy.dtype[numpy.int64]]:
        """Index of the first element of the runs ``first ... last - 1``: int64."""
        import numpy as np

        # Declared: the stubs of older releases of NumPy, which Python 3.10 gets, know a quotient's width no more.
        left: numpy.ndarray[Any, numpy.dtype[numpy.int64]] = np.arange(first, last, dtype=np.int64)
        starts = np.full(last - first, self.base, dtype=np.int64)
        for count, distance in reversed(self.outer):
            starts = starts + left % count * distance
            left = left // count
        return starts
