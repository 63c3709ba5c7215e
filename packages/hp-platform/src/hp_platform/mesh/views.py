"""Cutting meshes out of a mesh: slicing, flattening, splitting, joining. No communication; asked for twice, the same object."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from hp_platform.mesh import arithmetic, checks
from hp_platform.mesh.queries import MeshQueries
from hp_platform.mesh.root import RootState, refuse_overlap

if TYPE_CHECKING:
    from hp_platform.mesh.device_mesh import DeviceMesh


class MeshViews(MeshQueries):
    """The part of :class:`hp_platform.mesh.DeviceMesh` that makes meshes out of meshes."""

    def _place_in(
        self, state: RootState, names: tuple[str, ...] | None, dims: arithmetic.Dims, base: int
    ) -> None:
        self._state = state
        self._names = names
        self._dims = dims
        self._base = base
        self._shape = arithmetic.shape_of(dims)
        self._ranks = tuple(state.ranks[at] for at in arithmetic.positions(dims, base))
        position = state.position
        self._coordinate = None if position is None else arithmetic.coordinate(dims, base, position)
        state.views[names, dims, base] = cast("DeviceMesh", self)

    @classmethod
    def _view_of(
        cls, state: RootState, names: tuple[str, ...] | None, dims: arithmetic.Dims, base: int
    ) -> DeviceMesh:
        known = state.views.get((names, dims, base))
        if known is None:
            known = cast("DeviceMesh", cls.__new__(cls))
            known._place_in(state, names, dims, base)
        return known

    def _view(self, names: tuple[str, ...] | None, dims: arithmetic.Dims, base: int) -> DeviceMesh:
        return self._view_of(self._state, names, dims, base)

    @property
    def root_mesh(self) -> DeviceMesh:
        """The mesh that this one was cut out of, however often; a mesh that was not is its own root."""
        return self._view(self._state.names, self._state.dims, 0)

    def _anchor(self) -> int:
        """The position whose coordinates sub-meshes keep: this process, or for outsiders the first rank."""
        position = self._state.position
        return self._base if position is None or self._coordinate is None else position

    # --------------------------------------------------------------------------------------------------------- sub-meshes
    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """The sub-mesh of the named dims at this process' other coordinates: ``mesh["dp"]``, ``mesh["dp", "tp"]``.

        Asked for twice it is the same object; all names in order give the mesh itself. On a root the names of flattened
        dims count too. A process outside of the mesh gets the sub-mesh that holds the mesh's first rank, and is outside
        of that one too. No communication.

        RuntimeError on a mesh without names, and for dims that overlap; TypeError unless a str or a tuple of str;
        ValueError for an empty tuple, for names given twice or out of the mesh's order; KeyError for an unknown name;
        NotImplementedError for a flattened dim beside others if its ranks do not follow each other in equal steps.
        """
        own = self._named("slicing")
        names = checks.slice_names(mesh_dim_names)
        if not names:
            raise ValueError(f"mesh[()] asks for no dim; give at least one of {', '.join(own)}")
        if names == own:
            return cast("DeviceMesh", self)
        if self == self.root_mesh:  # or its twin
            dims = self._state.resolve(names)
        else:
            indices = [self._index(name) for name in names]
            if sorted(set(indices)) != indices:
                right = tuple(own[index] for index in sorted(set(indices)))
                raise ValueError(f"mesh[{names}] does not keep the mesh's order of dims; write mesh[{right}]")
            dims = tuple(self._dims[index] for index in indices)
        return self._view(names, dims, arithmetic.base_of(dims, self._anchor()))

    def flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """All dims as one, the first outermost; default name: the dims' names joined by ``_``.

        The name is then known to the root: ``mesh.root_mesh[name]``. A 1-D mesh under its own name is returned as it is.
        No communication: the group is made when asked for.

        RuntimeError on a mesh without names; TypeError unless the name is a str; ValueError if the name is empty, a dim of
        the root, or stands for other flattened dims, and if a dim is virtual.
        """
        own = self._named("flatten")
        name = "_".join(own) if mesh_dim_name is None else mesh_dim_name
        if own == (name,):
            return cast("DeviceMesh", self)
        checks.new_name(name, "mesh_dim_name")
        if any(arithmetic.is_virtual(dim) for dim in self._dims):
            raise ValueError(
                f"the dim {checks.VIRTUAL_DIM!r} is virtual and cannot be flattened; slice the other dims first"
            )
        dim = arithmetic.flat(self._dims)
        self._state.register(name, dim)
        return self._view((name,), (dim,), self._base)

    def get_flatten_mapping(self) -> dict[str, DeviceMesh]:
        """The root's flattened dims by name, as 1-D meshes at this process' coordinates."""
        root = self.root_mesh
        return {name: root[name] for name in self._state.flattened}

    def unflatten(
        self, mesh_dim: int | str, mesh_sizes: tuple[int, ...], mesh_dim_names: tuple[str, ...] | None = None
    ) -> DeviceMesh:
        """This mesh with one dim split into several, outermost first: 8 ranks as (2, 4).

        ``mesh_sizes`` multiply to the dim's size; the new dims need names exactly if this mesh has them, and are known to
        the new mesh, not to its root. No communication.

        TypeError and ValueError as for :func:`init_device_mesh`; ValueError also if the sizes do not multiply to the
        dim's, if they cut across the dims that it was flattened from, and if it is virtual.
        """
        index = self._index(mesh_dim)
        sizes = checks.sizes(mesh_sizes, "mesh_sizes")
        new_names = checks.names(mesh_dim_names, len(sizes))
        if (new_names is None) != (self._names is None):
            state, change = (
                ("no names", "leave mesh_dim_names out") if new_names else ("names", "give mesh_dim_names")
            )
            raise ValueError(f"the dims of {self} have {state}; {change}")
        for name in new_names or ():
            checks.new_name(name, "an entry of mesh_dim_names")
        dim = self._dims[index]
        if arithmetic.is_virtual(dim):
            raise ValueError(f"the dim {checks.VIRTUAL_DIM!r} is virtual and cannot be split")
        if math.prod(sizes) != self._shape[index]:
            raise ValueError(
                f"mesh_sizes {sizes} multiply to {math.prod(sizes)}, but dim {mesh_dim!r} has size {self._shape[index]}"
            )
        parts = arithmetic.split(dim, sizes)
        if parts is None:
            made_of = tuple(factor.size for factor in dim)
            raise ValueError(
                f"mesh_sizes {sizes} cut across the dims that {mesh_dim!r} was flattened from, which have the sizes {made_of}"
            )
        names = None
        if self._names is not None and new_names is not None:
            names = checks.names(
                (*self._names[:index], *new_names, *self._names[index + 1 :]), self.ndim - 1 + len(sizes)
            )
        return self._view(names, (*self._dims[:index], *parts, *self._dims[index + 1 :]), self._base)

    @staticmethod
    def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
        """One mesh with the dims of several, in the root's order; all cut out of one root, no dim in two of them.

        No communication. TypeError unless a sequence of meshes; ValueError if it is empty, for meshes of several roots, of
        other coordinates, or with a name in common; RuntimeError for meshes without names and for dims that overlap.
        """
        if not isinstance(meshes, (list, tuple)) or not all(isinstance(mesh, MeshViews) for mesh in meshes):
            raise TypeError(f"concatenate takes a list of DeviceMesh, not {meshes!r}")
        if not meshes:
            raise ValueError("concatenate needs at least one mesh, got none")
        state = meshes[0]._state
        if any(mesh._state is not state for mesh in meshes):
            roots = "; ".join(str(mesh.root_mesh) for mesh in meshes)
            raise ValueError(f"concatenate takes meshes cut out of one root, not of several: {roots}")
        pairs = [pair for mesh in meshes for pair in zip(mesh._named("concatenate"), mesh._dims, strict=True)]
        refuse_overlap(tuple(name for name, _ in pairs), [dim for _, dim in pairs], state)
        pairs.sort(key=lambda pair: arithmetic.order_key(pair[1]))
        names = checks.names(tuple(name for name, _ in pairs), len(pairs), "the dims of concatenated meshes")
        anchor = meshes[0]._anchor()
        if any(arithmetic.base_of(mesh._dims, anchor) != mesh._base for mesh in meshes):
            raise ValueError(
                f"concatenate takes meshes that share a rank: {'; '.join(map(str, meshes))} do not"
            )
        dims = tuple(dim for _, dim in pairs)
        return meshes[0]._view(names, dims, arithmetic.base_of(dims, anchor))

    # torch.distributed has these under private names only; its users may keep writing them.
    _flatten = flatten
    _unflatten = unflatten
    _concatenate = concatenate
