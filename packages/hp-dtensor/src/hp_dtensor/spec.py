"""Specs: where the pieces of one tensor lie. Immutable, one object per (mesh, placements, global shape), compared by identity.

A spec holds no dtype, so that casting changes no spec and plans serve all dtypes. Specs hang on their mesh
(``mesh.interned``) and go with it; so do the plans that are made of them.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, Protocol

from hp_dtensor.chunk import chunk_offset, chunk_size
from hp_dtensor.placements import PARTIAL, REPLICATE, Partial, Placement, Shard


class Mesh(Protocol):
    """What specs and rules need of a :class:`hp_platform.DeviceMesh`; arithmetic only."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of ranks along each dim."""
        ...

    @property
    def interned(self) -> MutableMapping[Any, Any]:
        """What hangs on the mesh."""
        ...

    def get_coordinate(self) -> Any:
        """This rank's position along each dim; None outside of the mesh."""
        ...


class Spec:
    """One way for a tensor of one global shape to lie on a mesh. Made by :func:`make_spec` only."""

    __slots__ = ("grad", "local_offset", "local_shape", "mesh", "placements", "plans", "shape")

    mesh: Any
    placements: tuple[Placement, ...]
    """One per mesh dim; dims of Shard are not negative."""
    shape: tuple[int, ...]
    """Global."""
    local_shape: tuple[int, ...]
    """Of this rank's piece."""
    local_offset: tuple[int, ...]
    """Where this rank's piece begins in the whole."""
    grad: Spec
    """Where gradients with respect to such a tensor lie: a Shard's is a Shard, a Replicate's and a sum's are Replicate.

    For an average of w ranks each rank's gradient is 1/w of the whole, so it is a sum.
    """
    plans: dict[Any, Any]
    """The cache of plans that all specs of a mesh share."""

    def __repr__(self) -> str:
        return f"{shown(self.placements)} of {self.shape} on mesh {tuple(self.mesh.shape)}"

    def __deepcopy__(self, memo: Any) -> Spec:
        return self


def make_spec(mesh: Mesh, placements: Sequence[Placement], shape: Sequence[int]) -> Spec:
    """The spec of these placements (negative dims resolved) and this global shape; the same object for the same request.

    Raises ValueError if the placements do not fit mesh and shape, RuntimeError on a rank outside of the mesh.
    """
    shape = tuple(shape)
    key = (resolve(mesh, placements, len(shape)), shape)
    found = mesh.interned.get(key)
    if found is None:
        found = mesh.interned[key] = _new_spec(mesh, *key)
    return found


def resolve(mesh: Mesh, placements: Sequence[Placement], ndim: int) -> tuple[Placement, ...]:
    """The placements of a tensor with ``ndim`` dims, negative dims resolved. ValueError if they do not fit."""
    if isinstance(placements, (Placement, str)) or not isinstance(placements, Sequence):
        raise ValueError(
            f"placements is a sequence with one placement per mesh dim, got {placements!r}; write [{placements!r}]"
        )
    if len(placements) != len(mesh.shape):
        raise ValueError(
            f"got {len(placements)} placements {shown(placements)} for a mesh of shape {tuple(mesh.shape)}; "
            f"give one per mesh dim"
        )
    return tuple(_resolve_one(placement, ndim) for placement in placements)


def _resolve_one(placement: Placement, ndim: int) -> Placement:
    if not isinstance(placement, Placement):
        raise ValueError(
            f"{placement!r} is no placement of hp_dtensor; give Shard(dim), Replicate() or Partial() for each mesh dim"
        )
    if not isinstance(placement, Shard):
        return placement
    if not -ndim <= placement.dim < ndim:
        dims = f"dims {-ndim} to {ndim - 1}" if ndim else "no dim to cut, use Replicate()"
        raise ValueError(f"{placement} does not fit a tensor with {ndim} dims: it has {dims}")
    return placement if placement.dim >= 0 else Shard(placement.dim + ndim)


def _new_spec(mesh: Mesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> Spec:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError(
            f"this rank is not in the mesh of shape {tuple(mesh.shape)}, so it holds no part of a tensor on it; "
            f"make and use such tensors on ranks of the mesh only"
        )
    spec = Spec()
    spec.mesh, spec.placements, spec.shape = mesh, placements, shape
    spec.local_shape, spec.local_offset = local_block(shape, placements, mesh.shape, coordinate)
    spec.plans = mesh.interned.setdefault("plans", {})
    of_gradient = tuple(map(_gradient_placement, placements))
    spec.grad = spec if of_gradient == placements else make_spec(mesh, of_gradient, shape)
    return spec


def _gradient_placement(placement: Placement) -> Placement:
    if not isinstance(placement, Partial):
        return placement
    return REPLICATE if placement == PARTIAL else PARTIAL


def local_block(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and offset of the piece at ``coordinate``: each mesh dim, from left to right, cuts what the former ones left."""
    sizes, offsets = list(shape), [0] * len(shape)
    for placement, num_ranks, index in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, Shard):
            dim = placement.dim
            offsets[dim] = offsets[dim] + chunk_offset(sizes[dim], num_ranks, index)
            sizes[dim] = chunk_size(sizes[dim], num_ranks, index)
    return tuple(sizes), tuple(offsets)


def shown(placements: Sequence[object]) -> str:
    """For messages: ``(Shard(0), Replicate())``."""
    return repr(tuple(placements))
