"""The one algorithm of draws, on the arrays of any library: words by the cipher, values of words, the elements asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from hp_platform.draws.distribution import Distribution
from hp_platform.draws.elementary import TERMS, cos_and_sin, log, normal_quantile
from hp_platform.draws.region import Region, Runs
from hp_platform.philox import words_of_blocks

Array = Any


class Arrays(Protocol):
    """What a library must offer, beside operators: int64 and float64 arrays, and the buffer that values are written to."""

    blocks_at_once: int
    """Blocks that are worked on together: what fits a cache on the host, what memory allows on a device."""

    def grid(self, starts: Any, count: int) -> Array:
        """int64 ``(len(starts), count)``: each start (numpy int64) and the numbers that follow it."""
        ...

    def interleaved(self, lanes: Sequence[Array]) -> Array:
        """Arrays ``(n, m)`` as one ``(n, m * len(lanes))``, of which every entry of the first comes before that of the second."""
        ...

    def shifted(self, x: Array, shifts: Any, width: int) -> Array:
        """``(n, width)``: of each row the part that begins at its shift (numpy int64)."""
        ...

    def double(self, x: Array) -> Array:
        """int64 to float64."""
        ...

    def bits(self, x: Array) -> Array:
        """The bits of float64 as int64."""
        ...

    def from_bits(self, x: Array) -> Array:
        """The inverse of :meth:`bits`."""
        ...

    def where(self, condition: Array, x: Any, y: Any) -> Array:
        """Elementwise choice."""
        ...

    def sqrt(self, x: Array) -> Array:
        """Square root, correctly rounded."""
        ...

    def rounded(self, x: Array, dtype: str) -> Array:
        """float64 to the dtype."""
        ...

    def buffer(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Memory for the result, whose dtype may be of half precision."""
        ...

    def write(self, buffer: Array, rows: slice, columns: slice, values: Array) -> None:
        """Put values into a part of it, in its dtype."""
        ...


def draw(xp: Arrays, distribution: Distribution, seed: int, stream: int, region: Region) -> Array:
    """The values of ``region`` in an array of its size."""
    runs = region.runs()
    buffer = xp.buffer((runs.count, runs.length), distribution.result)
    for rows, columns in _pieces(runs, distribution.per_block * xp.blocks_at_once):
        starts = runs.starts(rows.start, rows.stop) + columns.start
        first, shifts = starts // distribution.per_block, starts % distribution.per_block
        width = columns.stop - columns.start
        count = -(-(int(shifts.max()) + width) // distribution.per_block)
        lanes = words_of_blocks(xp.grid(first, count), seed, stream)
        values = xp.interleaved(_values(xp, distribution, lanes))
        xp.write(buffer, rows, columns, xp.shifted(values, shifts, width))
    return buffer.reshape(region.size)


def _pieces(runs: Runs, limit: int) -> Iterator[tuple[slice, slice]]:
    """Rectangles of rows and columns of about ``limit`` elements that cover all runs."""
    if runs.count == 0 or runs.length == 0:
        return
    width = min(runs.length, limit)
    height = max(1, limit // width)
    for row in range(0, runs.count, height):
        for column in range(0, runs.length, width):
            yield (
                slice(row, min(row + height, runs.count)),
                slice(column, min(column + width, runs.length)),
            )


def _values(xp: Any, distribution: Distribution, lanes: Sequence[Array]) -> Sequence[Array]:
    """The values of each block, in order."""
    if distribution.kind == "word":
        return lanes
    if distribution.kind == "event":
        return [word < distribution.threshold for word in lanes]
    if distribution.kind in ("long", "integer"):
        longs = [(lanes[i] >> 1) * 2**32 + lanes[i + 1] for i in (0, 2)]
        if distribution.kind == "long":
            return longs
        return [n % distribution.threshold + int(distribution.shift) for n in longs]
    if distribution.per_block == 2:
        digits, numbers = 53, [_fifty_three(lanes[i], lanes[i + 1]) for i in (0, 2)]
    elif distribution.kind == "uniform":
        digits, numbers = 24, [word >> 8 for word in lanes]
    else:
        digits, numbers = 32, list(lanes)
    return [_placed(xp, distribution, z) for z in _standard(xp, distribution, numbers, digits)]


def _fifty_three(upper: Array, lower: Array) -> Array:
    return (upper >> 5) * 2**26 + (lower >> 6)


def _standard(xp: Any, distribution: Distribution, numbers: Sequence[Array], digits: int) -> list[Array]:
    """float64 values before shift and scale, of whole numbers below ``2**digits``."""
    terms = TERMS[distribution.dtype]
    if distribution.kind == "uniform":
        return [xp.double(n) * 2.0**-digits for n in numbers]
    if distribution.kind == "exponential":
        return [log(xp, xp.double(n + 1), terms, digits) * -1.0 for n in numbers]
    if distribution.kind == "truncated":
        low, high = distribution.probabilities
        # Odd, so that neither end is met.
        units = [xp.double((n & -2) + 1) * 2.0**-digits for n in numbers]
        return [normal_quantile(xp, unit * (high - low) + low) for unit in units]
    values = []
    for first, second in zip(numbers[::2], numbers[1::2], strict=True):
        radius = xp.sqrt(log(xp, xp.double(first + 1), terms, digits) * -2.0)
        cos, sin = cos_and_sin(xp, second, digits, terms)
        values.extend([radius * cos, radius * sin])
    return values


def _placed(xp: Any, distribution: Distribution, z: Array) -> Array:
    x = z * distribution.scale + distribution.shift
    if distribution.kind == "truncated":
        low, high = distribution.bounds
        x = xp.where(x < low, low, x)
        x = xp.where(x > high, high, x)
    x = xp.rounded(x, distribution.dtype)
    return (
        x if distribution.kind != "uniform" else xp.where(x < distribution.largest, x, distribution.largest)
    )
