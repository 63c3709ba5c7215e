"""What a module in a style sends per call, in words: for :func:`hp_tp.describe`.

[Note: the protocol of descriptions] What runs in the place of a module's forward (``platform.override_forward``) may have a method
``collectives(module)``, which gives a :class:`Collectives`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hp_dtensor import Placement
from hp_dtensor.placements import Shard


class Transfer(NamedTuple):
    """One collective."""

    kind: str
    """As in :mod:`hp_platform.collectives`."""
    what: str
    nbytes_per_row: int | None = None
    """Bytes of the whole tensor for each place of a sequence (each element of all dims but the features); None: not known."""
    nbytes: int | None = None
    """Bytes of a tensor whose size is known."""

    def __str__(self) -> str:
        size = f" {self.nbytes:,d} B" if self.nbytes is not None else ""
        if self.nbytes_per_row is not None:
            size = f" {self.nbytes_per_row:,d} B/row"
        return f"{self.kind} of {self.what}{size}"


class Collectives(NamedTuple):
    """Those of one call and its backward."""

    forward: tuple[Transfer, ...] = ()
    backward: tuple[Transfer, ...] = ()


def nbytes_of(parameter: Any) -> int:
    """Bytes of a whole parameter."""
    count = 1
    for size in parameter.shape:
        count = count * size
    return count * itemsize_of(parameter)


def itemsize_of(parameter: Any) -> int:
    """Bytes of one element."""
    from hp_platform import get_platform

    return get_platform().itemsize(parameter.dtype)


def of_whole_input(layout: Placement, nbytes_per_row: int | None) -> Collectives:
    """Of an input that forward needs whole."""
    if isinstance(layout, Shard):
        return Collectives(
            (Transfer("all_gather", "the input", nbytes_per_row),),
            (Transfer("reduce_scatter", "its gradient", nbytes_per_row),),
        )
    return Collectives((), (Transfer("all_reduce", "a whole input's gradient", nbytes_per_row),))


def of_sum(wanted: Placement, nbytes_per_row: int | None, bias: Any) -> Collectives:
    """Of summands that are added up."""
    if wanted.is_replicate():
        return Collectives((Transfer("all_reduce", "the result", nbytes_per_row),))
    if not isinstance(wanted, Shard):
        return Collectives()
    backward = [Transfer("all_gather", "its gradient", nbytes_per_row)]
    if bias is not None:
        backward.append(Transfer("all_reduce", "the bias' gradient", nbytes=nbytes_of(bias)))
    return Collectives((Transfer("reduce_scatter", "the result", nbytes_per_row),), tuple(backward))


def of_parameters(names_and_parameters: list[tuple[str, Any]]) -> tuple[Transfer, ...]:
    """Of parameters of whose gradients every rank has a summand."""
    return tuple(
        Transfer("all_reduce", f"{n}'s gradient", nbytes=nbytes_of(p)) for n, p in names_and_parameters
    )
