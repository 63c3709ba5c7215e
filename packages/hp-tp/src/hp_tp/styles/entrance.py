"""What a module's input becomes at the door: the whole tensor, or this rank's piece of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from hp_dtensor import DTensor, Placement, Replicate, conversions
from hp_dtensor.chunk import chunk_sizes
from hp_dtensor.marks import marked
from hp_dtensor.module_tensors import is_dtensor
from hp_dtensor.placements import Shard
from hp_dtensor.spec import make_spec
from hp_platform import get_platform
from hp_tp.styles.shared import shared

Tensor = Any
_DIMS = (0,)
"""The mesh dim: these styles take a mesh of one."""


class Door(NamedTuple):
    """Where inputs arrive, and how plain ones are to be understood."""

    mesh: Any
    layout: Placement
    """How a plain input lies."""
    uneven: bool
    """Whether plain pieces may be of other sizes on other ranks, which are asked then."""
    what: str
    """For messages."""


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any], what: str) -> Any:
    """The tensor that a style is about. ValueError if the first positional argument is none."""
    if args and get_platform().is_tensor(args[0]):
        return args[0]
    given = f"a {type(args[0]).__name__}" if args else "none"
    named = f", and by name {', '.join(kwargs)}" if kwargs else ""
    raise ValueError(
        f"{what}: the first positional argument of forward must be a tensor, got {given}{named}: pass the tensor first"
    )


def enter_whole(x: Tensor, door: Door) -> Tensor:
    """The whole input as a plain tensor, for a forward that differs between ranks.

    Communication: of a piece one all-gather, in backward one reduce-scatter; of a whole tensor none, in backward one
    all-reduce. Once for all modules that get the same tensor: see [Note: kept with the tensor].
    """
    mesh = door.mesh
    if is_dtensor(x):
        _check_mesh(x, door)
        placement, local = x.placements[0], x._local
        if placement.is_replicate():
            return marked(x, _DIMS) if mesh.shape[0] > 1 else local
    else:
        placement, local = door.layout, x
        if placement.is_replicate():
            if mesh.shape[0] == 1 or not records(x):
                return x
            group = mesh.get_group(0)
            return shared(x, ("mark", group), lambda used: conversions.mark(x, (group,), used))
    if not isinstance(placement, Shard):
        return marked(as_dtensor(x, door).redistribute(placements=[Replicate()]), _DIMS)
    if mesh.shape[0] == 1:
        return local
    shape = x.shape if is_dtensor(x) else whole_shape(x, door)
    cut = cut_along(mesh, placement.dim % len(shape), shape)
    if not records(local):
        return conversions.gather_varying(local, cut)
    key = ("gather", cut.group, cut.dim)
    return shared(local, key, lambda used: conversions.gather_varying(local, cut, None, used))


def enter_piece(x: Tensor, door: Door, dim: int) -> Tensor:
    """This rank's piece of an input that is cut along ``dim`` (counted from the end).

    Communication: none for a piece of that dim, and for a whole tensor (in backward one all-gather); else what
    redistribution needs.
    """
    ndim = len(x.shape)
    if ndim < -dim:
        _no_dim(x, door, dim)
    wanted = Shard(ndim + dim)
    if not is_dtensor(x):
        layout = door.layout
        if isinstance(layout, Shard) and layout.dim % ndim == wanted.dim:
            return x
    x = as_dtensor(x, door)
    if x.placements[0] != wanted:
        x = x.redistribute(placements=[wanted])
    return x._local


def as_dtensor(x: Tensor, door: Door) -> Any:
    """A DTensor as it is; a plain tensor as the piece that the layout says."""
    if is_dtensor(x):
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
        key = ("shape", door.mesh.get_group(0), dim)
        return shared(x, key, lambda used: DTensor.from_local(x, door.mesh, [layout]).shape)
    return (*shape[:dim], shape[dim] * door.mesh.shape[0], *shape[dim + 1 :])


def cut_along(mesh: Any, dim: int, shape: tuple[int, ...]) -> conversions.Cut:
    """How a dim is dealt to the ranks of a mesh of one dim."""
    group = mesh.get_group(0)
    key = ("tp cut", dim, shape[dim])
    known: conversions.Cut | None = mesh.interned.get(key)
    # The group may have been destroyed and made again.
    if known is None or known.group is not group:
        sizes = chunk_sizes(shape[dim], mesh.shape[0])
        known = conversions.Cut(group, mesh.group_positions(0), mesh.get_coordinate()[0], dim, sizes)
        mesh.interned[key] = known
    return known


def records(x: Tensor) -> bool:
    """Whether what is done with ``x`` now is recorded for a gradient."""
    platform = get_platform()
    return platform.is_grad_enabled() and platform.requires_grad(x)


def _check_mesh(x: Any, door: Door) -> None:
    if x.device_mesh is not door.mesh and x.device_mesh != door.mesh:
        raise ValueError(
            f"{door.what}: the input lies on {x.device_mesh}, but the style was applied on {door.mesh}: redistribute it there "
            f"first"
        )


def _no_dim(x: Tensor, door: Door, dim: int) -> int:
    raise ValueError(f"{door.what}: the input of shape {tuple(x.shape)} has no dim {dim} that could be cut")
