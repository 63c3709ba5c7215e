"""A mesh pickles as its description, and is made anew from it where it is unpickled.

It then holds the same ranks, seen from the rank of the process that unpickles: coordinates and groups are that process' own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hp_platform.mesh import arithmetic
from hp_platform.mesh.device_mesh import DeviceMesh
from hp_platform.mesh.init import root_mesh
from hp_platform.mesh.place import find_place


class MeshDescription(NamedTuple):
    """All that makes a mesh: its root, the names of flattened dims there, and what was cut out."""

    device_type: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    root_names: tuple[str, ...] | None
    init_backend: bool
    flattened: tuple[tuple[str, arithmetic.Dim], ...]
    names: tuple[str, ...] | None
    dims: arithmetic.Dims
    base: int


def description_of(mesh: DeviceMesh) -> MeshDescription:
    """What to write."""
    state = mesh._state
    return MeshDescription(
        state.device_type,
        arithmetic.shape_of(state.dims),
        state.ranks,
        state.names,
        state.init_backend,
        tuple(state.flattened.items()),
        mesh._names,
        mesh._dims,
        mesh._base,
    )


def mesh_of(written: MeshDescription) -> DeviceMesh:
    """The mesh, of this process' world if there is one. ValueError if a flattened name means other dims on the root there."""
    rank, _ = find_place()
    root = root_mesh(
        written.device_type,
        written.shape,
        written.ranks,
        written.root_names,
        rank=rank,
        init_backend=written.init_backend,
    )
    for name, dim in written.flattened:
        root._state.register(name, dim)
    return root._view(written.names, written.dims, written.base)


def mesh_of_plain(written: tuple[Any, ...]) -> DeviceMesh:
    """:func:`mesh_of` for a description of which nothing is left but plain tuples, numbers and strings."""

    def dim(factors: tuple[Any, ...]) -> arithmetic.Dim:
        return tuple(arithmetic.Factor(*factor) for factor in factors)

    given = MeshDescription(*written)
    return mesh_of(
        given._replace(
            flattened=tuple((name, dim(factors)) for name, factors in given.flattened),
            dims=tuple(map(dim, given.dims)),
        )
    )
