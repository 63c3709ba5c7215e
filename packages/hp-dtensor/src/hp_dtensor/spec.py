"""Specs: where the pieces of one tensor lie. Immutable, one object per (mesh, placements, global shape), compared by identity.

A spec holds no dtype, so that casting changes no spec and plans serve all dtypes. Specs hang on their mesh
(``mesh.interned``) and go with it; so do the plans that are made of them.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from hp_dtensor.cuts import Stack, block_of, stacks_of, with_stacks
from hp_dtensor.cuts import local_block as local_block
from hp_dtensor.placements import PARTIAL, REPLICATE, Partial, Placement, RaggedShard, Shard, StridedShard
from hp_dtensor.ragged import check_ragged, ragged_dim, run_sizes

if TYPE_CHECKING:
    from hp_dtensor.layout import Layout

VIRTUAL_DIM = "interleaved_parallel"
"""The name of a last mesh dim that takes no ranks."""


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

    __slots__ = ("cuts", "grad", "local_offset", "local_shape", "mesh", "placements", "plans", "shape")

    mesh: Any
    placements: tuple[Placement, ...]
    """One per mesh dim; dims of Shard are not negative."""
    cuts: tuple[Stack, ...]
    """For each tensor dim the mesh dims that cut it, outermost first: see [Note: cut order] in :mod:`hp_dtensor.cuts`."""
    shape: tuple[int, ...]
    """Global."""
    local_shape: tuple[int, ...]
    """Of this rank's piece; of a RaggedShard 1-D."""
    local_offset: tuple[int, ...]
    """Where this rank's piece begins in the whole; of a RaggedShard in its flat order."""
    grad: Spec
    """Where gradients with respect to such a tensor lie: a Shard's is a Shard, a Replicate's and a sum's are Replicate.

    Of an average of w ranks each rank's gradient is 1/w of the whole, so it is a sum; so it is for a maximum and a minimum,
    where it goes to the rank that has it, in equal parts to those that tie. The factors of a product have each their own
    gradient, which no placement describes; for them it is given as Replicate, like for what has no gradient.
    """
    plans: dict[Any, Any]
    """The cache of plans that all specs of a mesh share."""

    def __repr__(self) -> str:
        return f"{shown(self.placements)} of {self.shape} on mesh {tuple(self.mesh.shape)}"

    def __deepcopy__(self, memo: Any) -> Spec:
        return self


def make_spec(mesh: Mesh, placements: Sequence[Any] | Layout, shape: Sequence[int]) -> Spec:
    """The spec of these placements (negative dims resolved) and this global shape; the same object for the same request.

    Raises ValueError if the placements do not fit mesh and shape, RuntimeError on a rank outside of the mesh.
    """
    shape = tuple(shape)
    key = (resolve(mesh, placements, len(shape)), shape)
    found = mesh.interned.get(key)
    if found is None:
        # Another thread may have made it in the meantime; specs are compared by identity.
        found = mesh.interned.setdefault(key, _new_spec(mesh, *key))
    return found


def resolve(mesh: Mesh, placements: Sequence[Any] | Layout, ndim: int) -> tuple[Placement, ...]:
    """The placements of a tensor with ``ndim`` dims, negative dims resolved. ValueError if they do not fit.

    A :class:`hp_dtensor.Layout` and aliases are taken, too: everything that takes placements comes through here. Of several
    notations for the same cuts the result is the one of [Note: cut order] in :mod:`hp_dtensor.cuts`.
    """
    if not _is_plain(placements):
        from hp_dtensor.layout import plain_placements

        placements = plain_placements(mesh, placements, ndim)
    if isinstance(placements, (Placement, str)) or not isinstance(placements, Sequence):
        raise ValueError(
            f"placements is a sequence with one placement per mesh dim, got {placements!r}; write [{placements!r}]"
        )
    if len(placements) != len(mesh.shape):
        raise ValueError(
            f"got {len(placements)} placements {shown(placements)} for a mesh of shape {tuple(mesh.shape)}; "
            f"give one per mesh dim"
        )
    resolved = tuple(_resolve_one(placement, ndim) for placement in placements)
    if any(isinstance(placement, StridedShard) for placement in resolved):
        return with_stacks(resolved, stacks_of(resolved, mesh.shape, ndim), mesh.shape)
    return resolved


def _is_plain(placements: Any) -> bool:
    return isinstance(placements, (tuple, list)) and all(isinstance(p, Placement) for p in placements)


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
    return placement if placement.dim >= 0 else replace(placement, dim=placement.dim + ndim)


def _new_spec(mesh: Mesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> Spec:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError(
            f"this rank is not in the mesh of shape {tuple(mesh.shape)}, so it holds no part of a tensor on it; "
            f"make and use such tensors on ranks of the mesh only"
        )
    names = getattr(mesh, "mesh_dim_names", None)
    if names and names[-1] == VIRTUAL_DIM and not placements[-1].is_replicate():
        raise ValueError(
            f"mesh dim {VIRTUAL_DIM!r} stands for slices inside of one device, so a tensor cannot be {placements[-1]} along "
            f"it: use Replicate() there; only the arithmetic of Layout knows such slices"
        )
    spec = Spec()
    spec.mesh, spec.placements, spec.shape = mesh, placements, shape
    spec.cuts = stacks_of(placements, mesh.shape, len(shape))
    spec.local_shape, spec.local_offset = _piece(spec, coordinate)
    spec.plans = mesh.interned.setdefault("plans", {})
    of_gradient = tuple(map(_gradient_placement, placements))
    spec.grad = spec if of_gradient == placements else make_spec(mesh, of_gradient, shape)
    return spec


def _piece(spec: Spec, coordinate: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    at = ragged_dim(spec.placements)
    if at is None:
        return block_of(spec.shape, spec.cuts, spec.mesh.shape, coordinate)
    check_ragged(spec.placements, spec.mesh.shape, spec.shape)
    placement = spec.placements[at]
    assert isinstance(placement, RaggedShard)
    sizes = run_sizes(placement, spec.shape)
    return (sizes[coordinate[at]],), (sum(sizes[: coordinate[at]]),)


def _gradient_placement(placement: Placement) -> Placement:
    if not isinstance(placement, Partial):
        return placement
    return PARTIAL if placement.reduce_op in ("avg", "max", "min") else REPLICATE


MOST_PLANS = 16384
"""So many plans are kept per mesh, some 25 MB: a program has some per operation and shape."""


def remember(plans: MutableMapping[Any, Any], key: Any, plan: Any) -> None:
    """Keep a plan. Where values or shapes that ever change make ever new ones, the older half goes first."""
    if len(plans) >= MOST_PLANS:
        for old in list(plans)[: MOST_PLANS // 2]:
            del plans[old]
    plans[key] = plan


def shown(placements: Sequence[object]) -> str:
    """For messages: ``(Shard(0), Replicate())``."""
    return repr(tuple(placements))
