"""What a module's result becomes at the door: what the style was asked for, as a DTensor or as this rank's piece of it."""

from __future__ import annotations

from typing import Any

from hp_dtensor import DTensor, Placement, conversions
from hp_dtensor.placements import Shard
from hp_dtensor.spec import make_spec, resolve
from hp_platform import get_platform
from hp_tp.styles.entrance import Door, cut_along

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
    (wanted,) = resolve(mesh, [wanted], len(shape))
    if mesh.shape[0] > 1:
        if wanted.is_replicate():
            y = conversions.all_reduce(y, mesh.get_group(0))
        elif isinstance(wanted, Shard):
            y = conversions.reduce_scatter(y, cut_along(mesh, wanted.dim, shape))
    if bias is not None:
        y = y + _bias_beside(bias, len(shape), dim, wanted, door)
    if use_local:
        check_even(shape, wanted, door, dim)
        return y
    return DTensor._wrap(y, make_spec(mesh, [wanted], shape))


def _bias_beside(bias: Tensor, ndim: int, dim: int, wanted: Placement, door: Door) -> Tensor:
    """What is added to a result that lies so."""
    mesh, platform = door.mesh, get_platform()
    if mesh.shape[0] > 1:
        group = mesh.get_group(0)
        if wanted.is_shard(dim):
            bias = conversions.slice_out(bias, cut_along(mesh, 0, tuple(bias.shape)))
        elif isinstance(wanted, Shard):
            bias = conversions.mark(bias, (group,))
        elif not wanted.is_replicate():
            bias = conversions.keep_on(bias, mesh.get_coordinate()[0] == 0)
    if dim == ndim - 1:
        return bias
    return platform.reshape(bias, (*bias.shape, *(1,) * (ndim - 1 - dim)))


def check_even(shape: Shape, placement: Placement, door: Door, known_dim: int) -> None:
    """ValueError for pieces of several sizes that go out as plain tensors: nobody behind could tell how many there are in all."""
    if not isinstance(placement, Shard) or placement.dim == known_dim or door.uneven:
        return
    size, num_ranks = shape[placement.dim], door.mesh.shape[0]
    if size % num_ranks:
        raise ValueError(
            f"{door.what}: dim {placement.dim} of size {size} does not divide over {num_ranks} ranks, and as plain pieces of "
            f"several sizes the result could not be understood by the next module: hand it out as a DTensor "
            f"(use_local_output=False), or say uneven=True here and in the styles that take it"
        )
