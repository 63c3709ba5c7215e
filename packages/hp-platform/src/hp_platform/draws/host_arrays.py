"""Draws on the host, by numpy. Both frameworks use it for cpu, so their values there are equal to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from hp_platform.draws.distribution import Distribution
from hp_platform.draws.evaluate import draw
from hp_platform.draws.region import Region

Array: TypeAlias = "np.ndarray[Any, Any]"


class HostArrays:
    """Implements :class:`hp_platform.draws.Arrays`."""

    blocks_at_once = 1 << 14  # measured: the dozen arrays of one piece stay in the second-level cache

    def grid(self, starts: Array, count: int) -> Array:
        """Numbers that follow each start."""
        return starts[:, None] + np.arange(count, dtype=np.int64)

    def interleaved(self, lanes: Sequence[Array]) -> Array:
        """Entries in turn."""
        rows = max(lane.shape[0] for lane in lanes)
        return np.stack(np.broadcast_arrays(*lanes), axis=-1).reshape(rows, -1)

    def shifted(self, x: Array, shifts: Array, width: int) -> Array:
        """Parts of rows."""
        if (shifts == shifts[0]).all():
            return x[:, shifts[0] : shifts[0] + width]
        return np.take_along_axis(x, shifts[:, None] + np.arange(width), axis=1)

    def double(self, x: Array) -> Array:
        """float64."""
        return x.astype(np.float64)

    def bits(self, x: Array) -> Array:
        """int64 view."""
        return x.view(np.int64)

    def from_bits(self, x: Array) -> Array:
        """float64 view."""
        return x.view(np.float64)

    def where(self, condition: Array, x: Any, y: Any) -> Array:
        """Choice; a Python number takes the dtype of the array beside it."""
        like = x if isinstance(x, np.ndarray) else y
        return np.where(condition, np.asarray(x, like.dtype), np.asarray(y, like.dtype))

    def sqrt(self, x: Array) -> Array:
        """Square root."""
        return np.sqrt(x)

    def rounded(self, x: Array, dtype: str) -> Array:
        """Another dtype."""
        return x.astype(dtype)

    def buffer(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Memory; numpy has no bfloat16, so half precision is left to the framework."""
        return np.empty(shape, "float32" if dtype == "bfloat16" else dtype)

    def write(self, buffer: Array, rows: slice, columns: slice, values: Array) -> None:
        """A part of it."""
        buffer[rows, columns] = values


def draw_on_host(
    distribution: Distribution, seed: int, stream: int, region: Region, arrays: Any = None
) -> Any:
    """The values in a buffer of ``arrays``; None: of :class:`HostArrays`, a numpy array that owns its memory."""
    # The products of the cipher fill 64 bits: see the note in hp_platform.philox.
    with np.errstate(over="ignore"):
        return draw(HostArrays() if arrays is None else arrays, distribution, seed, stream, region)
