"""What a module's result becomes at the door: what the style was asked for, as a DTensor or as this rank's piece of it."""

from __future__ import annotations

from typing import Any

from hp_dtensor import DTensor, Placement, conversions
from hp_dtensor.placements import Shard
from hp_dtensor.spec import make_spec, resolve
from hp_platform import get_platform
from hp_tp.styles import moves
from hp_tp.styles.door import Door, refused
from hp_tp.styles.moves import cut_along
from hp_tp.styles.placing import summed_over

Tensor = Any
Shape = tuple[int, ...]


def leave(y: Any, wanted: Placement, door: Door, *, use_local: bool, known_dim: int) -> Any:
    """The DTensor ``y`` in the wanted placement: itself, or this rank's piece. Communication: what redistribution needs.

    ``known_dim``: the dim of features, of which a module behind knows how many there are in all.
    """
    (wanted,) = resolve(door.mesh, [wanted], len(y.shape))
    if y.placements[0] != wanted:
        y = y.redistribute(placements=[wanted])
    if not use_local:
        return y
    check_even(y.shape, wanted, door, known_dim)
    return y.to_local()


def leave_piece(y: Tensor, shape: Shape, dim: int, wanted: Placement, door: Door, *, use_local: bool) -> Any:
    """The result of which ``y`` is this rank's piece along ``dim`` (from 0)."""
    if use_local and isinstance(wanted, Shard) and wanted.dim in (dim, dim - len(shape)):
        return y
    whole = DTensor._wrap(y, make_spec(door.mesh, [Shard(dim)], shape))
    return leave(whole, wanted, door, use_local=use_local, known_dim=dim)


def leave_sum(
    y: Tensor, bias: Tensor | None, shape: Shape, dim: int, wanted: Placement, door: Door, *, use_local: bool
) -> Any:
    """The result of which ``y`` is this rank's summand, plus a whole ``bias`` along ``dim`` (from 0).

    The bias is added behind the reduction: once, and nothing is divided. Communication: for a whole result one all-reduce, for
    a piece one reduce-scatter, in backward one all-gather and one all-reduce of the bias' gradient, of which each rank has a summand.
    """
    mesh = door.mesh
    if use_local and wanted.is_replicate():  # the usual case, and nothing else is to be looked at
        if mesh.shape[0] > 1:
            y = moves.all_reduce(y, door)
        return y if bias is None else _plus(y, bias, dim)
    (wanted,) = resolve(mesh, [wanted], len(shape))
    if mesh.shape[0] > 1:
        if wanted.is_replicate():
            y = moves.all_reduce(y, door)
        elif isinstance(wanted, Shard):
            y = moves.reduce_scatter(y, door, wanted.dim, shape)
    return leave_reduced(y, bias, shape, dim, wanted, door, use_local=use_local)


def leave_reduced(
    y: Tensor, bias: Tensor | None, shape: Shape, dim: int, wanted: Placement, door: Door, *, use_local: bool
) -> Any:
    """The result that lies as wanted already, plus a whole ``bias`` along ``dim`` (from 0)."""
    (wanted,) = resolve(door.mesh, [wanted], len(shape))
    if bias is not None:
        y = _plus(y, _bias_beside(bias, dim, wanted, door), dim)
    if use_local:
        check_even(shape, wanted, door, dim)
        return y
    return DTensor._wrap(y, make_spec(door.mesh, [wanted], shape))


def _bias_beside(bias: Tensor, dim: int, wanted: Placement, door: Door) -> Tensor:
    """What is added to a result that lies so."""
    mesh = door.mesh
    if mesh.shape[0] == 1 or wanted.is_replicate():
        return bias
    if wanted.is_shard(dim):
        return conversions.slice_out(bias, cut_along(mesh, 0, tuple(bias.shape)))
    if isinstance(wanted, Shard):
        return summed_over(bias, door)
    return conversions.keep_on(bias, mesh.get_coordinate()[0] == 0)


def _plus(y: Tensor, bias: Tensor, dim: int) -> Tensor:
    """``y`` plus a vector along ``dim``, in the dtype of ``y``, which may be narrower (autocast)."""
    platform = get_platform()
    if bias.dtype != y.dtype:
        bias = platform.cast(bias, y.dtype)
    if dim < y.ndim - 1:
        bias = platform.reshape(bias, (*bias.shape, *(1,) * (y.ndim - 1 - dim)))
    return y + bias


def check_even(shape: Shape, placement: Placement, door: Door, known_dim: int) -> None:
    """ValueError for pieces of several sizes that go out as plain tensors: nobody behind could tell how many there are in all."""
    if not isinstance(placement, Shard) or placement.dim == known_dim or door.uneven:
        return
    size, num_ranks = shape[placement.dim], door.mesh.shape[0]
    if size % num_ranks:
        raise refused(
            door.what,
            f"dim {placement.dim} of size {size} does not divide over {num_ranks} ranks, and as plain pieces of "
            f"several sizes the result could not be understood by the next module: hand it out as a DTensor "
            f"(use_local_output=False), or say uneven=True here and in the styles that take it",
        )
