"""Placements: how a tensor lies along one dim of a mesh. A tensor has one per mesh dim, the first mesh dim outermost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

REDUCE_OPS: Final = ("sum", "avg", "max", "min", "prod", "all", "any")
"""The reductions that a :class:`Partial` may wait for."""
_SPELLINGS: Final = {**{op: op for op in REDUCE_OPS}, "mean": "avg", "product": "prod"}


class Placement:
    """What all placements have in common. Immutable, hashable, compared by value."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether the tensor is cut along this mesh dim; with ``dim``: along that tensor dim."""
        return isinstance(self, Shard) and (dim is None or dim == self.dim)

    def is_replicate(self) -> bool:
        """Whether every rank along this mesh dim holds the same."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether the ranks along this mesh dim hold values to be reduced; with ``reduce_op``: by that reduction."""
        return isinstance(self, Partial) and (
            reduce_op is None or _SPELLINGS.get(reduce_op) == self.reduce_op
        )


@dataclass(frozen=True, repr=False)
class Shard(Placement):
    """Tensor dim ``dim`` is cut over the ranks along this mesh dim by the rule of :mod:`hp_dtensor.chunk`.

    The chunks are ceil-sized, the last ones short or empty. A negative ``dim`` counts from the last tensor dim and is
    resolved where the placement meets a tensor. Several mesh dims may cut one tensor dim: the leftmost makes the outer cut
    (see :class:`StridedShard` for other orders).
    """

    dim: int

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise ValueError(f"{type(self).__name__}(dim) takes a tensor dim as an int, got {self.dim!r}")

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, repr=False)
class StridedShard(Shard):
    """A :class:`Shard` whose cut is made inside of cuts of mesh dims further right.

    ``split_factor`` is the product of the sizes of those mesh dims. On a mesh (dp, tp) the placements
    ``(StridedShard(0, tp_size), Shard(0))`` let tp make the outer cut and dp the inner one, which is what sharding over dp
    after tensor parallelism gives; ``(Shard(0), Shard(0))`` is the other order.

    ValueError for a ``split_factor`` below 1; where the placements meet a mesh, also for one that is no product of sizes of
    the outermost cuts further right. Where that product is 1 it is the same as ``Shard(dim)``, and becomes it.
    """

    split_factor: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            isinstance(self.split_factor, bool)
            or not isinstance(self.split_factor, int)
            or self.split_factor < 1
        ):
            raise ValueError(
                f"StridedShard(dim, split_factor) takes the number of chunks that mesh dims further right cut before, "
                f"1 or more, got {self.split_factor!r}"
            )

    def __repr__(self) -> str:
        return f"StridedShard({self.dim}, {self.split_factor})"


@dataclass(frozen=True, repr=False)
class RaggedShard(Placement):
    """The leading dims, flattened to cells, are dealt in runs of unequal length to the ranks along this mesh dim.

    Args:
        dims: ``(0, 1, ... k - 1)``: the dims that are flattened. A cell is one index of them, with all that is behind it.
        local_units: one number per rank, 0 or more; the ranks get cells in proportion. Their sum must divide the number of
            cells. A rank with 0 units holds nothing.

    The local tensor is 1-D: the cells of this rank, one after the other. All other mesh dims must be Replicate.
    ValueError for other arguments.
    """

    dims: tuple[int, ...]
    local_units: tuple[int, ...]

    def __post_init__(self) -> None:
        dims, units = _integers(self.dims, "dims"), _integers(self.local_units, "local_units")
        if not dims or dims != tuple(range(len(dims))):
            raise ValueError(f"RaggedShard(dims) takes the leading dims (0, 1, ...), got {self.dims!r}")
        if min(units, default=-1) < 0 or sum(units) == 0:
            raise ValueError(
                f"RaggedShard(local_units) takes a number of units per rank, none below 0 and not all 0, got "
                f"{self.local_units!r}"
            )
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "local_units", units)

    def __repr__(self) -> str:
        return f"RaggedShard({self.dims}, {self.local_units})"


def _integers(values: Any, name: str) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or any(isinstance(v, bool) or not isinstance(v, int) for v in values):
        raise ValueError(f"RaggedShard({name}) takes a sequence of ints, got {values!r}")
    return tuple(values)


@dataclass(frozen=True, repr=False)
class Replicate(Placement):
    """Every rank along this mesh dim holds the same values."""

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, repr=False)
class Partial(Placement):
    """Every rank along this mesh dim holds a tensor of full size; the value is their reduction, element by element.

    ``reduce_op`` is ``"sum"`` (default), ``"avg"`` (also spelled ``"mean"``), ``"max"``, ``"min"``, ``"prod"`` (also
    ``"product"``), ``"all"`` or ``"any"`` (of bools); ValueError for any other. Where several mesh dims are Partial with
    reductions that do not commute, the rightmost reduces first.
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        known = _SPELLINGS.get(self.reduce_op) if isinstance(self.reduce_op, str) else None
        if known is None:
            raise ValueError(
                f"Partial(reduce_op) takes one of {', '.join(map(repr, REDUCE_OPS))}, got {self.reduce_op!r}"
            )
        object.__setattr__(self, "reduce_op", known)

    @property
    def is_linear(self) -> bool:
        """Whether it is a sum or an average, which linear operations carry through."""
        return self.reduce_op in ("sum", "avg")

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op!r})"


REPLICATE: Final = Replicate()
PARTIAL: Final = Partial()
"""The one sum that rules and gradients produce."""
