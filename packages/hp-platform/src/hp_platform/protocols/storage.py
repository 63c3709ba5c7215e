"""Where tensors lie in their storages: what is copied away once for all views of one memory, and given back as such views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hp_platform.protocols.tensor import DType, Tensor


@dataclass(frozen=True, slots=True)
class StoragePlace:
    """The part of a storage that a tensor shows."""

    key: int
    """Tells storages apart that exist at the same time."""
    start: int
    """Byte of the first element."""
    nbytes: int
    """From there to behind the last element; gaps between elements count."""
    strides: tuple[int, ...]
    """In elements."""


class StorageOps(Protocol):
    """Primitives on the memory below tensors, beside those of :class:`hp_platform.protocols.TensorOps`. Nothing is recorded."""

    def storage_place(self, x: Tensor) -> StoragePlace | None:
        """Where ``x`` lies; None for what has no elements, no memory, or is more than elements at a distance (sparse, conjugate, quantised
        tensors, and those of the users' own classes).
        """
        ...

    def storage_bytes(self, x: Tensor, start: int, nbytes: int) -> Tensor:
        """``(nbytes,)`` uint8 over the storage of ``x`` from byte ``start`` on, both multiples of the itemsize of ``x``. ``x`` has a place."""
        ...

    def over_bytes(
        self, memory: Tensor, start: int, dtype: DType, shape: Sequence[int], strides: Sequence[int]
    ) -> Tensor:
        """A tensor of these strides (in elements) over the 1-D uint8 tensor ``memory``, whose byte ``start`` is that of its first element.

        The byte must be a multiple of the itemsize, counted in the storage. It keeps the memory alive; writes to one such tensor need
        not count for the others.
        """
        ...

    def num_over_storage(self, x: Tensor) -> int | None:
        """How many tensors there are over the storage of ``x``, what a graph keeps among them; None where the framework does not count."""
        ...
