"""DeviceMesh: ranks arranged in a grid, whose lines are the groups that communicate."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hp_platform import _process
from hp_platform.mesh import arithmetic, checks, place
from hp_platform.mesh.root import RootState, cache_key, new_state
from hp_platform.mesh.views import MeshViews

if TYPE_CHECKING:
    from hp_platform.group import ProcessGroup


class DeviceMesh(MeshViews):
    """Global ranks arranged in a grid with named dims. :func:`init_device_mesh` makes the usual ones.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ``"npu"``, or ``"gpu"`` for ``"cuda"``.
        mesh: global ranks as a nested list or tuple, a numpy array or a tensor of integers; None: one dim of all ranks.
        mesh_dim_names: one name per dim. Slicing, flattening and the queries by name need them. The last name may be
            ``"interleaved_parallel"``: a virtual dim, which splits the work inside each device and takes no ranks, so each
            row of ``mesh`` must repeat one rank.
        _init_backend: whether asking for a group makes the default process group if there is none.
        _rank: the rank to see the mesh from, for dry runs and tests; default: the world's, else the launcher's.

    A mesh is a value: it does not change, copies are the mesh itself, and meshes of equal device type, shape, names and
    ranks are equal. Making one costs no communication and needs no process group; groups are made when asked for. A rank
    outside of the mesh may make it: its coordinates are None and it cannot ask for groups.

    TypeError for arguments of another type; ValueError for an unknown device type, a 0-d, empty or ragged ``mesh``, ranks
    that occur twice or are not in the world, names of another number or not unique; RuntimeError if nothing says which
    rank this process is.
    """

    interned: dict[Any, Any]
    """For values that belong to this mesh and should exist once, such as the specs of sharded tensors. Starts empty."""

    def __init__(
        self,
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: tuple[str, ...] | None = None,
        _init_backend: bool = True,
        _rank: int | None = None,
    ) -> None:
        device = checks.device_type(device_type)
        rank, world_size = place.find_place() if _rank is None else (checks.integer(_rank, "_rank"), None)
        if mesh is None:
            if _rank is not None:
                raise ValueError("_rank sees a mesh as another process would; give the ranks of mesh, too")
            mesh = list(range(world_size or 1))
        # Names are checked against the shape, but whether the last one is virtual decides how to read the array.
        virtual = isinstance(mesh_dim_names, tuple) and mesh_dim_names[-1:] == (checks.VIRTUAL_DIM,)
        shape, ranks = checks.rank_array(mesh, virtual)
        names = checks.names(mesh_dim_names, len(shape))
        checks.ranks_of_world(ranks, world_size, "mesh")
        rank = place.rank_for(ranks, rank)
        state = new_state(device, shape, ranks, names, rank=rank, init_backend=_init_backend)
        self._place_in(state, names, state.dims, 0)

    def _place_in(
        self, state: RootState, names: tuple[str, ...] | None, dims: arithmetic.Dims, base: int
    ) -> None:
        super()._place_in(state, names, dims, base)
        self._hash = hash((self.device_type, self.to_hash()))
        self._groups: dict[int, ProcessGroup] = {}
        self.interned = {}

    # ------------------------------------------------------------------------------------------------------------- groups
    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """The group along a dim that holds this process; the dim may be left out on a 1-D mesh.

        Meshes share groups of equal ranks. The ranks of a group ascend, whatever the mesh's order: see
        :meth:`group_positions`. The first request makes the group, with the default process group before it unless
        ``_init_backend`` is off: all members must ask, in the same order relative to their other groups. Later ones cost a
        look-up. A dim of size 1, or a virtual one, gives a group that never communicates.

        RuntimeError if the dim is left out on a mesh with several, if this process is not in the mesh, and if there is no
        default process group and ``_init_backend`` is off.
        """
        from hp_platform import subgroups

        index = self._index_or_only(mesh_dim, "get_group")
        world = _process.state.world
        if world is not None and world.tables is not None:
            group = self._groups.get(index)
            # A group that was destroyed, or went with its world, is no longer in the table.
            if group is not None and world.tables.groups.get(group.ranks) is group:
                return group
        self._member("get_group")
        self._join_world()
        group = subgroups.group_of(self.get_rank_list_along_axis(index))
        self._groups[index] = group
        return group

    def _join_world(self) -> None:
        from hp_platform import process_groups

        if self._state.init_backend:
            world = process_groups.ensure_initialized(self.device_type)
        else:
            world = process_groups.get_world()
        if world.rank != self.rank:
            raise RuntimeError(
                f"{self} was made for rank {self.rank}, but this process is rank {world.rank} of the world: make the mesh "
                f"after init_process_group(), without _rank"
            )
        assert world.tables is not None
        world.tables.meshes.setdefault(cache_key(self._state), self.root_mesh)

    def group_positions(self, mesh_dim: int | str | None = None) -> tuple[int, ...]:
        """For each coordinate along a dim, where its rank stands in ``get_group(mesh_dim).ranks``. Pure.

        (0, 1, 2, ...) unless the mesh arranges the ranks otherwise than ascending; then what a collective gathers or
        scatters by rank must be permuted by this. RuntimeError as for :meth:`get_group` except for a missing world.
        """
        line = self.get_rank_list_along_axis(self._index_or_only(mesh_dim, "group_positions"))
        ascending = {rank: position for position, rank in enumerate(sorted(line))}
        return tuple(ascending[rank] for rank in line)

    def get_all_groups(self) -> list[ProcessGroup]:
        """:meth:`get_group` of every dim."""
        return [self.get_group(index) for index in range(self.ndim)]

    def get_comm_group_by_axis(self, name: int | str) -> ProcessGroup:
        """:meth:`get_group`."""
        return self.get_group(name)

    @staticmethod
    def from_group(
        group: ProcessGroup | Any | Sequence[ProcessGroup | Any],
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: tuple[str, ...] | None = None,
    ) -> DeviceMesh:
        """A mesh over groups that exist: one group (a 1-D mesh of its ranks), or one group per dim with ``mesh``.

        Groups are ours or the framework's own handles; they become the groups of their ranks, as by
        :func:`hp_platform.mark_created_groups`. Every process gives the groups that hold it. No communication.

        Errors of :class:`DeviceMesh`; ValueError also for another number of groups than dims, a missing ``mesh``, and a
        group whose ranks are not those along its dim; RuntimeError if there is no default process group.
        """
        from hp_platform.mesh.from_group import mesh_from_groups

        return mesh_from_groups(group, device_type, mesh, mesh_dim_names)

    # ---------------------------------------------------------------------------------------------- the mesh in a context
    def __enter__(self) -> DeviceMesh:
        _process.mesh_stack.set((*_process.mesh_stack.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        stack = _process.mesh_stack.get()
        if not stack or stack[-1] is not self:
            inner = str(stack[-1]) if stack else "none"
            raise RuntimeError(
                f"{self} was left while the current mesh is another ({inner}); leave meshes innermost first"
            )
        _process.mesh_stack.set(stack[:-1])

    # -------------------------------------------------------------------------------------------------- the mesh as value
    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return self.device_type == other.device_type and self.to_hash() == other.to_hash()

    def __hash__(self) -> int:
        return self._hash

    def twin(self) -> DeviceMesh:
        """An equal mesh that is another object, with an :attr:`interned` of its own: values that hang on the one are told from
        those that hang on the other. Groups and sub-meshes are the same. No communication.
        """
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.interned = {}
        return made

    def __copy__(self) -> DeviceMesh:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        from hp_platform.mesh.pickling import description_of, mesh_of

        return mesh_of, (description_of(self),)
