"""Placements: how a tensor lies along one dim of a mesh. A tensor has one per mesh dim, the first mesh dim outermost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_SPELLINGS: Final = {"sum": "sum", "avg": "avg", "mean": "avg"}


class Placement:
    """What :class:`Shard`, :class:`Replicate` and :class:`Partial` have in common. Immutable, hashable, compared by value."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether the tensor is cut along this mesh dim; with ``dim``: along that tensor dim."""
        return isinstance(self, Shard) and (dim is None or dim == self.dim)

    def is_replicate(self) -> bool:
        """Whether every rank along this mesh dim holds the same."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether the ranks along this mesh dim hold summands; with ``reduce_op``: of that reduction."""
        return isinstance(self, Partial) and (
            reduce_op is None or _SPELLINGS.get(reduce_op) == self.reduce_op
        )


@dataclass(frozen=True, repr=False)
class Shard(Placement):
    """Tensor dim ``dim`` is cut over the ranks along this mesh dim by the rule of :mod:`hp_dtensor.chunk`.

    The chunks are ceil-sized, the last ones short or empty. A negative ``dim`` counts from the last tensor dim and is
    resolved where the placement meets a tensor. Several mesh dims may cut one tensor dim: the leftmost makes the outer cut.
    """

    dim: int

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise ValueError(f"Shard(dim) takes a tensor dim as an int, got {self.dim!r}")

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, repr=False)
class Replicate(Placement):
    """Every rank along this mesh dim holds the same values."""

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, repr=False)
class Partial(Placement):
    """Every rank along this mesh dim holds a tensor of full size; the value is their sum, or their average.

    ``reduce_op`` is ``"sum"`` (default) or ``"avg"`` (also spelled ``"mean"``); ValueError for any other.
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in _SPELLINGS:
            raise ValueError(
                f"Partial(reduce_op) takes 'sum' or 'avg', got {self.reduce_op!r}; for another reduction call "
                f"all_reduce(local, group, op) and make the DTensor with Replicate()"
            )
        object.__setattr__(self, "reduce_op", _SPELLINGS[self.reduce_op])

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op!r})"


REPLICATE: Final = Replicate()
PARTIAL: Final = Partial()
"""The one sum that rules and gradients produce."""
