"""What a module's input becomes at the door: the whole tensor, or this rank's piece of it."""

from __future__ import annotations

from typing import Any

from hp_dtensor import DTensor, Replicate
from hp_dtensor.dtensor import DTensorMethods
from hp_dtensor.marks import marked
from hp_dtensor.placements import Shard
from hp_dtensor.spec import make_spec
from hp_platform import get_platform
from hp_tp.styles import moves, put_off
from hp_tp.styles.door import Door, refused
from hp_tp.styles.shared import may_share, shared

Tensor = Any
_DIMS = (0,)
"""The mesh dim: these styles take a mesh of one."""


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any], what: str) -> Any:
    """The tensor that a style is about. ValueError if the first positional argument is none."""
    if args and get_platform().is_tensor(args[0]):
        return args[0]
    given = f"a value of type {type(args[0]).__name__}" if args else "none"
    named = f", and by name {', '.join(kwargs)}" if kwargs else ""
    raise refused(
        what,
        f"the first positional argument of forward must be a tensor, got {given}{named}: pass the tensor first",
    )


def enter_whole(x: Tensor, door: Door) -> Tensor:
    """The whole input as a plain tensor, for a forward that differs between ranks.

    Communication: of a piece one all-gather, in backward one reduce-scatter; of a whole tensor none, in backward one
    all-reduce. Once for all modules that get the same tensor: see [Note: kept with the tensor]. Whoever does anything but
    :func:`hp_tp.styles.put_off.linear` with it says so, by :func:`hp_tp.styles.put_off.is_elsewhere`.
    """
    mesh = door.mesh
    if isinstance(x, DTensorMethods):
        _check_mesh(x, door)
        placement, local = x.placements[0], x._local
        if placement.is_replicate():
            return marked(x, _DIMS) if mesh.shape[0] > 1 else local
    else:
        placement, local = door.layout, x
        if placement.is_replicate():
            if mesh.shape[0] == 1 or not records(x):
                return x
            return shared(x, door, ("mark",), lambda used: put_off.mark(x, door, used))
    if not isinstance(placement, Shard):
        return marked(as_dtensor(x, door).redistribute(placements=[Replicate()]), _DIMS)
    if mesh.shape[0] == 1:
        return local
    shape = x.shape if isinstance(x, DTensorMethods) else whole_shape(x, door)
    dim = placement.dim % len(shape)
    if not may_share(local):
        return moves.gather(local, door, dim, shape)
    key = ("gather", local.dtype, dim)
    return shared(local, door, key, lambda used: put_off.gather(local, door, dim, shape, used), is_copy=True)


def enter_piece(x: Tensor, door: Door, dim: int) -> Tensor:
    """This rank's piece of an input that is cut along ``dim`` (counted from the end).

    Communication: none for a piece of that dim, and for a whole tensor (in backward one all-gather); else what
    redistribution needs.
    """
    ndim = len(x.shape)
    if ndim < -dim:
        _no_dim(x, door, dim)
    if not isinstance(x, DTensorMethods):
        layout = door.layout
        if isinstance(layout, Shard) and layout.dim in (dim, ndim + dim):
            return x
    x, wanted = as_dtensor(x, door), Shard(ndim + dim)
    if x.placements[0] != wanted:
        x = x.redistribute(placements=[wanted])
    return x._local


def as_dtensor(x: Tensor, door: Door) -> Any:
    """A DTensor as it is; a plain tensor as the piece that the layout says."""
    if isinstance(x, DTensorMethods):
        _check_mesh(x, door)
        return x
    return DTensor._wrap(x, make_spec(door.mesh, [door.layout], whole_shape(x, door)))


def whole_shape(x: Tensor, door: Door) -> tuple[int, ...]:
    """The shape of the tensor of which a plain ``x`` is the piece that the layout says.

    The others' pieces are taken to be as large, or with ``uneven`` they are asked: one all-gather of integers.
    """
    shape, layout = tuple(x.shape), door.layout
    if not isinstance(layout, Shard) or door.mesh.shape[0] == 1:
        return shape
    dim = layout.dim % len(shape) if -len(shape) <= layout.dim < len(shape) else _no_dim(x, door, layout.dim)
    if door.uneven:
        return shared(x, door, ("shape", dim), lambda used: DTensor.from_local(x, door.mesh, [layout]).shape)
    return (*shape[:dim], shape[dim] * door.mesh.shape[0], *shape[dim + 1 :])


def records(x: Tensor) -> bool:
    """Whether what is done with ``x`` now is recorded for a gradient."""
    platform = get_platform()
    return platform.is_grad_enabled() and platform.requires_grad(x)


def _check_mesh(x: Any, door: Door) -> None:
    if x.device_mesh is not door.mesh and x.device_mesh != door.mesh:
        raise refused(
            door.what,
            f"the input lies on {x.device_mesh}, but the style was applied on {door.mesh}: redistribute it there "
            f"first",
        )


def _no_dim(x: Tensor, door: Door, dim: int) -> int:
    raise refused(door.what, f"the input of shape {tuple(x.shape)} has no dim {dim} that could be cut")
