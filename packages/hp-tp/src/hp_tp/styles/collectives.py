"""What a module in a style sends per call, in words: for :func:`hp_tp.describe`.

[Note: the protocol of descriptions] What runs in the place of a module's forward (``platform.override_forward``) may have a method
``collectives(module)``, which gives a :class:`Collectives`: those of a call with a plain input that requires a gradient and lies
as its style says, and with a plain result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hp_dtensor import Placement
from hp_dtensor.placements import Partial, Replicate, Shard
from hp_platform import get_platform


class Transfer(NamedTuple):
    """One collective."""

    kind: str
    """As in :mod:`hp_platform.collectives`."""
    what: str
    nbytes_per_row: int | None = None
    """Bytes for each place of a sequence (each element of all dims but the features): of the whole tensor, of an all_to_all what a rank
    sends; None: not known."""
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

    def and_then(self, other: Collectives) -> Collectives:
        """These, and others behind them in forward; in backward those come first."""
        return Collectives((*self.forward, *other.forward), (*other.backward, *self.backward))


def nbytes_of(parameter: Any) -> int:
    """Bytes of a whole parameter."""
    count = 1
    for size in parameter.shape:
        count = count * size
    return count * itemsize_of(parameter)


def itemsize_of(parameter: Any) -> int:
    """Bytes of one element."""
    return get_platform().itemsize(parameter.dtype)


def of_operations(what: str) -> Collectives:
    """Of operations on DTensors, which depend on how these lie and on their sizes: not known before."""
    return Collectives((Transfer("collectives", f"{what}, as its operations on DTensors need them"),))


def of_sizes(layout: Placement, uneven: bool) -> Collectives:
    """Of a plain piece whose size the ranks tell each other."""
    if not uneven or not isinstance(layout, Shard):
        return Collectives()
    return Collectives((Transfer("all_gather", "the sizes of pieces"),))


def of_whole_input(layout: Placement, nbytes_per_row: int | None) -> Collectives:
    """Of an input that forward needs whole."""
    if isinstance(layout, Shard):
        return Collectives(
            (Transfer("all_gather", "the input", nbytes_per_row),),
            (Transfer("reduce_scatter", "its gradient", nbytes_per_row),),
        )
    back = Collectives((), (Transfer("all_reduce", "a whole input's gradient", nbytes_per_row),))
    return of_move(layout, Replicate(), "the input", nbytes_per_row, 1).and_then(back)


def of_move(
    source: Placement, wanted: Placement, what: str, nbytes_per_row: int | None, num_ranks: int
) -> Collectives:
    """Of a tensor that is brought from one placement to another, whose gradient comes as that other one lies.

    Dims are compared as they are written: features, which are counted from the end, are taken for another dim than any that is
    counted from the front.
    """
    if source == wanted:
        return Collectives()
    row, gradient = nbytes_per_row, f"{what}'s gradient"
    if isinstance(wanted, Shard):
        if isinstance(source, Shard):
            sent = None if row is None else -(-row // num_ranks)
            return Collectives(
                (Transfer("all_to_all", what, sent),), (Transfer("all_to_all", gradient, sent),)
            )
        forward = () if source.is_replicate() else (Transfer("reduce_scatter", what, row),)
        return Collectives(forward, (Transfer("all_gather", gradient, row),))
    if source.is_replicate() or not wanted.is_replicate():
        return Collectives()
    return Collectives((Transfer("all_gather" if isinstance(source, Shard) else "all_reduce", what, row),))


def of_sum(
    wanted: Placement, nbytes_per_row: int | None, bias: Any, feature_dim: int, num_ranks: int
) -> Collectives:
    """Of summands that are added up, and of a whole bias behind them."""
    moved = of_move(Partial(), wanted, "the result", nbytes_per_row, num_ranks)
    if bias is None or not isinstance(wanted, Shard) or not get_platform().requires_grad(bias):
        return moved
    kind = "all_gather" if wanted.dim == feature_dim else "all_reduce"
    back = Transfer(kind, "the bias' gradient", nbytes=nbytes_of(bias))
    return moved.and_then(Collectives((), (back,)))


def of_parameters(names_and_parameters: list[tuple[str, Any]]) -> tuple[Transfer, ...]:
    """Of parameters of whose gradients every rank has a summand."""
    return tuple(
        Transfer("all_reduce", f"{n}'s gradient", nbytes=nbytes_of(p))
        for n, p in names_and_parameters
        if get_platform().requires_grad(p)
    )
