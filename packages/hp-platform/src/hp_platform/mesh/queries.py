"""What a mesh says of itself: sizes, coordinates, ranks along a dim. Pure: no group, no process, no framework."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hp_platform.mesh import arithmetic, checks, place

if TYPE_CHECKING:
    from hp_platform.mesh.root import RootState

UNSHARDED = "None"
"""The alias of a tensor dim that no mesh dim splits; its reverse index is -1."""


class MeshQueries:
    """The questions of :class:`hp_platform.mesh.DeviceMesh` that need no group.

    Wherever a mesh dim is asked for it may be given as an index (negative ones count from the last dim) or as a name. An
    index outside of the mesh is a ValueError, an unknown name a KeyError, a name on a mesh without names a RuntimeError.
    """

    _state: RootState
    _dims: arithmetic.Dims
    _base: int
    _names: tuple[str, ...] | None
    _shape: tuple[int, ...]
    _ranks: tuple[int, ...]
    _coordinate: tuple[int, ...] | None

    # ------------------------------------------------------------------------------------------------ the mesh as a whole
    @property
    def device_type(self) -> str:
        """``"cpu"``, ``"cuda"`` or ``"npu"``."""
        return self._state.device_type

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """One name per dim, or None."""
        return self._names

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of coordinates along every dim."""
        return self._shape

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """:attr:`shape`."""
        return self._shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self._shape)

    @property
    def rank_list(self) -> tuple[int, ...]:
        """Global ranks in row-major order, each once (a virtual last dim repeats none)."""
        return self._ranks

    @property
    def mesh(self) -> Any:
        """Global ranks as a read-only numpy array of :attr:`shape`, int32. Along a virtual last dim one rank repeats."""
        import numpy as np

        taken = tuple(1 if arithmetic.is_virtual(dim) else arithmetic.size_of(dim) for dim in self._dims)
        return np.broadcast_to(np.array(self._ranks, dtype=np.int32).reshape(taken), self._shape)

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Coordinates along one dim; None: ranks of the whole mesh."""
        return len(self._ranks) if mesh_dim is None else self._shape[self._index(mesh_dim)]

    def to_hash(self) -> tuple[tuple[int, ...], tuple[str, ...] | None, tuple[int, ...]]:
        """(shape, names, rank_list): what makes two meshes of one device type equal."""
        return self._shape, self._names, self._ranks

    # ------------------------------------------------------------------------------------------------------- this process
    @property
    def rank(self) -> int:
        """Global rank of this process. RuntimeError in a process that has none (a mesh unpickled outside of a job)."""
        if self._state.rank is None:
            raise RuntimeError(
                f"this process has no rank, so {self} cannot say anything about it: start it with torchrun, msrun or "
                f"hp_platform.launch.spawn, or call init_process_group() before the mesh is made"
            )
        return self._state.rank

    def get_rank(self) -> int:
        """:attr:`rank`."""
        return self.rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Coordinate of this process along every dim; None if it is not in the mesh. 0 along a virtual dim."""
        return self._coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Coordinate of this process along one dim; the dim may be left out on a 1-D mesh.

        RuntimeError if the dim is left out elsewhere, or if this process is not in the mesh. It is the position in
        ``get_group(mesh_dim).ranks`` where the ranks ascend along the dim (:meth:`DeviceMesh.group_positions`).
        """
        return self._member("get_local_rank")[self._index_or_only(mesh_dim, "get_local_rank")]

    # -------------------------------------------------------------------------------------------------------- along a dim
    def group_ranks(self, mesh_dim: int | str | None = None) -> tuple[tuple[int, ...], ...]:
        """All groups along a dim as global ranks: one per combination of the other coordinates, in row-major order of them.

        The ranks of a group stand in mesh order. Along a virtual dim every rank is a group of its own.
        """
        index = self._index_or_only(mesh_dim, "group_ranks")
        ranks = self._state.ranks
        return tuple(
            tuple(ranks[at] for at in line) for line in arithmetic.lines(self._dims, self._base, index)
        )

    def get_rank_list_along_axis(self, name: int | str) -> list[int]:
        """Global ranks that share all other coordinates with this process, in mesh order. RuntimeError outside of the mesh."""
        self._member("get_rank_list_along_axis")
        return self.get_devices_for_axis(name, self.rank)

    def get_devices_for_axis(self, name: int | str, rank: int) -> list[int]:
        """Global ranks that share all other coordinates with the global rank ``rank``; ValueError if the mesh lacks it."""
        index = self._index(name)
        position = self._state.position_of.get(rank)
        if position is None or arithmetic.coordinate(self._dims, self._base, position) is None:
            raise ValueError(f"rank {rank!r} is not in {self}; give one of its ranks")
        return [self._state.ranks[at] for at in arithmetic.line_through(self._dims, index, position)]

    def get_device_num_along_axis(self, name: int | str) -> int:
        """Number of coordinates along a dim."""
        return self._shape[self._index(name)]

    def axis_index(self, name: str) -> int:
        """Position of a dim, counted from the first."""
        return self._index(name)

    def axis_id(self, name: str) -> int:
        """Position of a dim, counted from the last (0): the number that tensor maps use. -1 for ``"None"``."""
        return -1 if name == UNSHARDED else self.ndim - 1 - self._index(name)

    def get_global_shape(
        self, local_shape: Sequence[int], tensor_map: Sequence[int | Sequence[int]]
    ) -> tuple[int, ...]:
        """Shape of the whole tensor whose even shards have ``local_shape``.

        ``tensor_map`` has per tensor dim the :meth:`axis_id` of the mesh dim that splits it, -1 for none, or several of
        them. ValueError for another length, an id that no dim has, or a mesh dim used twice.
        """
        if len(local_shape) != len(tensor_map):
            raise ValueError(
                f"local_shape {tuple(local_shape)} has {len(local_shape)} dims and tensor_map {tuple(tensor_map)} "
                f"{len(tensor_map)}; give one entry per tensor dim"
            )
        splits = [tuple(entry) if isinstance(entry, Sequence) else (entry,) for entry in tensor_map]
        used = [axis for entry in splits for axis in entry if axis != -1]
        for axis in used:
            if not 0 <= axis < self.ndim:
                raise ValueError(
                    f"tensor_map {tuple(tensor_map)} has the entry {axis}; a mesh with {self.ndim} dims has "
                    f"-1 (unsharded) and 0 (last dim) to {self.ndim - 1}"
                )
        if len(set(used)) != len(used):
            raise ValueError(
                f"tensor_map {tuple(tensor_map)} uses a mesh dim twice; each splits one tensor dim"
            )
        return tuple(
            length * math.prod(self._shape[self.ndim - 1 - axis] for axis in entry if axis != -1)
            for length, entry in zip(local_shape, splits, strict=True)
        )

    # ----------------------------------------------------------------------------------------------------- shared look-ups
    def _named(self, what: str) -> tuple[str, ...]:
        if self._names is None:
            raise RuntimeError(
                f"{what} needs dim names, which {self} has not: make the mesh with mesh_dim_names"
            )
        return self._names

    def _index(self, mesh_dim: int | str) -> int:
        if isinstance(mesh_dim, str):
            names = self._named(f"dim {mesh_dim!r}")
            if mesh_dim not in names:
                raise KeyError(f"no dim is named {mesh_dim!r}; the dims are {', '.join(names)}")
            return names.index(mesh_dim)
        index = checks.integer(mesh_dim, "a mesh dim (if it is not a name)")
        if not -self.ndim <= index < self.ndim:
            raise ValueError(
                f"mesh dim {index} does not exist: the mesh has {self.ndim} dims, {-self.ndim} to {self.ndim - 1}"
            )
        return index % self.ndim

    def _index_or_only(self, mesh_dim: int | str | None, what: str) -> int:
        if mesh_dim is not None:
            return self._index(mesh_dim)
        if self.ndim > 1:
            dims = ", ".join(self._names or map(str, range(self.ndim)))
            raise RuntimeError(
                f"{what} on a mesh with {self.ndim} dims needs to know which: give mesh_dim, one of {dims}"
            )
        return 0

    def _member(self, what: str) -> tuple[int, ...]:
        if self._coordinate is None:
            raise RuntimeError(
                f"{what}: rank {self.rank} is not in {self}; only ranks of the mesh may ask (get_coordinate() is None elsewhere)"
            )
        return self._coordinate

    def __repr__(self) -> str:
        if self._names is None:
            dims = "x".join(map(str, self._shape))
        else:
            dims = ", ".join(f"{name}={size}" for name, size in zip(self._names, self._shape, strict=True))
        return f"DeviceMesh({self.device_type!r}, {dims}, ranks {place.shown(self._ranks)})"
