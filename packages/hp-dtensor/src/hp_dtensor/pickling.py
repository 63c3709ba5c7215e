"""Copies and pickles of DTensors. A pickle holds this rank's piece only, and where it lies, written in plain values."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from hp_dtensor import placements as known
from hp_dtensor.base import DTensorBase
from hp_dtensor.placements import Placement
from hp_dtensor.spec import make_spec
from hp_platform import DeviceMesh, get_platform

Tensor = Any


def rebuild_dtensor(
    local: Tensor,
    mesh: tuple[Any, ...],
    placements: tuple[tuple[Any, ...], ...],
    shape: tuple[int, ...],
    requires_grad: bool,
    attributes: dict[str, Any],
) -> Any:
    """What pickles of DTensors call. ``torch.load`` allows it after ``torch.serialization.add_safe_globals([rebuild_dtensor])``.

    The tensor lies on the same ranks as before, and each rank must read what it wrote itself: ValueError if ``local`` is not
    this rank's piece. Needs the ranks' world to exist. No communication.
    """
    from hp_dtensor.native import DTensor

    spec = make_spec(_mesh_of(mesh), tuple(map(_placement_of, placements)), shape)
    if tuple(local.shape) != spec.local_shape:
        raise ValueError(
            f"the file holds a piece of shape {tuple(local.shape)}, but this rank's piece of {spec} has shape "
            f"{spec.local_shape}: read the file that this rank wrote, or use hp_dtensor's checkpoints, which re-shard"
        )
    x = DTensor._wrap(local, spec)
    vars(x).update(attributes)
    return x.requires_grad_(True) if requires_grad else x


class PickleMethods(DTensorBase):
    """Copies and pickles."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        spec, platform = self._spec, get_platform()
        local = platform.detach(self._local)
        # A view would be written with all the memory that it is a view of.
        own_bytes = platform.itemsize(local.dtype) * _count(spec.local_shape)
        has_memory = platform.device_of(local) != "meta"
        if has_memory and platform.storage_nbytes(local) != own_bytes:
            local = platform.clone(local)
        placements = tuple(map(_written, spec.placements))
        mesh = _plain(_description(spec.mesh))
        return rebuild_dtensor, (
            local, mesh, placements, spec.shape, platform.requires_grad(self._local), self._attributes()
        )  # fmt: skip

    def __copy__(self) -> Any:
        """The same memory, as copies of tensors have; a leaf."""
        platform = get_platform()
        made = self._wrap(platform.detach(self._local), self._spec)
        vars(made).update(self._attributes())
        return made.requires_grad_(True) if platform.requires_grad(self._local) else made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A leaf of its own memory, with a copy of its gradient. RuntimeError for what operations made, as of any tensor."""
        if id(self) in memo:
            return memo[id(self)]
        platform = get_platform()
        if not platform.is_leaf(self._local):
            raise RuntimeError(
                f"{self!r} was made by an operation and cannot be copied deeply: use detach() first"
            )
        made = self._wrap(platform.clone(platform.detach(self._local)), self._spec)
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(self._attributes(), memo))
        if platform.requires_grad(self._local):
            made.requires_grad_(True)
            made.grad = copy.deepcopy(self.grad, memo)  # type: ignore[attr-defined]
        return made

    def _attributes(self) -> dict[str, Any]:
        """What users and frameworks have attached; not what makes the DTensor itself."""
        return {name: value for name, value in vars(self).items() if name not in _OWN}


_OWN = frozenset({"_local", "_spec", "_marks", "_grad_dtensor"})


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count = count * n
    return count


def _written(placement: Placement) -> tuple[Any, ...]:
    fields = dataclasses.fields(placement)  # type: ignore[arg-type]
    return type(placement).__name__, *(getattr(placement, field.name) for field in fields)


def _placement_of(written: tuple[Any, ...]) -> Placement:
    kind = getattr(known, written[0], None)
    if not (isinstance(kind, type) and issubclass(kind, Placement)):
        raise ValueError(
            f"the file names a placement {written[0]!r}, which this version of hp_dtensor does not know"
        )
    made: Placement = kind(*written[1:])
    return made


def _description(mesh: DeviceMesh) -> Any:
    from hp_platform.mesh.pickling import description_of

    return description_of(mesh)


def _mesh_of(written: tuple[Any, ...]) -> DeviceMesh:
    from hp_platform.mesh.pickling import mesh_of_plain

    return mesh_of_plain(written)


def _plain(nest: Any) -> Any:
    return tuple(map(_plain, nest)) if isinstance(nest, tuple) else nest
