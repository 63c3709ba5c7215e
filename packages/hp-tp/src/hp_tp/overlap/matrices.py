"""Activations as matrices: ``(..., rows of the cut dim, ..., features)`` is ``(outer, rows, features)``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hp_dtensor.transport import Cut
from hp_platform import get_platform

Tensor = Any


@dataclass(frozen=True, eq=False)
class Matrices:
    """How tensors that are cut along one dim, which is not the last, look to a product.

    ``outer`` counts what the dims before the cut one hold: with 1 each rank's piece is one block of rows of the whole.
    """

    cut: Cut
    """Of the tensor itself."""
    before: tuple[int, ...]
    """Sizes of the dims before the cut one,"""
    between: tuple[int, ...]
    """and of those behind it but the last."""

    @classmethod
    def of(cls, shape: tuple[int, ...], cut: Cut) -> Matrices:
        """Of a piece, or the whole, of ``shape``."""
        return cls(cut, tuple(shape[: cut.dim]), tuple(shape[cut.dim + 1 : -1]))

    @cached_property
    def outer(self) -> int:
        """Number of matrices."""
        return math.prod(self.before)

    @cached_property
    def _rows(self) -> int:
        """Per step of the cut dim."""
        return math.prod(self.between)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Rows of every rank's piece, by coordinate."""
        return tuple(size * self._rows for size in self.cut.sizes)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where they begin in the whole."""
        return tuple(sum(self.sizes[:place]) for place in range(len(self.sizes)))

    @cached_property
    def total(self) -> int:
        """Rows of the whole."""
        return sum(self.sizes)

    @cached_property
    def flat_cut(self) -> Cut:
        """How the rows of ``(rows, features)``, or of ``(outer, rows, features)``, are dealt: the collectives copy less with dim 0."""
        cut = self.cut
        return Cut(cut.group, cut.positions, cut.index, 0 if self.outer == 1 else 1, self.sizes)

    def ranges(self, coordinates: Sequence[int]) -> list[tuple[int, int]]:
        """Start and length of the rows of these ranks, neighbours together."""
        found: list[tuple[int, int]] = []
        for coordinate in sorted(coordinates):
            start, length = self.starts[coordinate], self.sizes[coordinate]
            if found and sum(found[-1]) == start:
                found[-1] = (found[-1][0], found[-1][1] + length)
            elif length:
                found.append((start, length))
        return found

    def flat(self, x: Tensor) -> Tensor:
        """``(outer, rows, features)``, contiguous."""
        platform = get_platform()
        shape = (self.outer, x.shape[self.cut.dim] * self._rows, x.shape[-1])
        return platform.contiguous(platform.reshape(x, shape))

    def whole(self, x: Tensor) -> Tensor:
        """Back, of all ranks' rows, with as many features as there are."""
        return self._shaped(x, sum(self.cut.sizes))

    def piece(self, x: Tensor) -> Tensor:
        """Back, of this rank's rows."""
        return self._shaped(x, self.cut.sizes[self.cut.index])

    def _shaped(self, x: Tensor, steps: int) -> Tensor:
        return get_platform().reshape(x, (*self.before, steps, *self.between, x.shape[-1]))

    def communicated(self, x: Tensor) -> Tensor:
        """Of ``(outer, rows, features)`` what :attr:`flat_cut` speaks of."""
        return get_platform().reshape(x, (x.shape[1], x.shape[2])) if self.outer == 1 else x

    def of_communicated(self, x: Tensor) -> Tensor:
        """The inverse."""
        return get_platform().reshape(x, (1, *x.shape)) if self.outer == 1 else x

    def nbytes(self, features: int, dtype: Any) -> int:
        """Of a whole tensor."""
        return self.outer * self.total * features * get_platform().itemsize(dtype)
