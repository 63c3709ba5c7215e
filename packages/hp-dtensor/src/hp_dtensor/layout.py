"""Layout: a mesh and how a tensor lies on it, in both notations. Arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hp_dtensor.aliases import Alias, aliases_of, are_aliases, placements_of
from hp_dtensor.cuts import with_stacks
from hp_dtensor.layout_arithmetic import LayoutArithmetic
from hp_dtensor.placements import REPLICATE, Partial, Placement, Shard

if TYPE_CHECKING:
    from hp_platform import DeviceMesh

Placements = tuple[Placement, ...]


class Layout(LayoutArithmetic):
    """How tensors of some number of dims lie on a mesh.

    Args:
        mesh_shape: number of ranks along each mesh dim.
        alias_name: one name per mesh dim. The last one may be ``"interleaved_parallel"``: slices inside one device.
        rank_list: the global ranks, row by row; default: the contiguous block that holds this rank.
        init_backend: whether asking the mesh for a group makes the default process group if there is none.

    Such a layout belongs to no tensor yet: it is Replicate, and calling it gives layouts of tensors::

        layout = Layout((2, 4), ("dp", "tp"))
        layout("dp", "None")            # dim 0 cut over dp
        layout(("dp", "tp"), "None")    # dim 0 cut over dp, each part over tp
        layout(Shard(0), Replicate())   # one placement per mesh dim

    Immutable: what "sets" something gives another layout. Layouts of equal content on one mesh object are one object.
    Communication: none. Errors of :func:`hp_platform.init_device_mesh`.
    """

    __slots__ = ("_mesh", "_meta", "_ndim", "_placements")

    _meta: tuple[Any, Any, Any] | None

    def __new__(
        cls,
        mesh_shape: tuple[int, ...],
        alias_name: tuple[str, ...],
        rank_list: Sequence[int] | None = None,
        init_backend: bool = True,
    ) -> Layout:
        """See the class."""
        from hp_platform import init_device_mesh

        mesh = init_device_mesh(
            None, tuple(mesh_shape), tuple(alias_name), rank_list=rank_list, init_backend=init_backend
        )
        return cls.from_device_mesh(mesh)

    @staticmethod
    def from_device_mesh(device_mesh: DeviceMesh) -> Layout:
        """The layout of no tensor yet on a mesh that there is."""
        return _interned(device_mesh, (REPLICATE,) * len(device_mesh.shape), None, None)

    def __call__(self, *aliases: Any) -> Layout:
        """The layout of a tensor: one alias per tensor dim, or one placement per mesh dim (also as one list).

        Without arguments: a tensor without dims, Replicate. What was Partial is forgotten. ValueError for unknown names, names
        used twice, entries of another type, another number of placements than mesh dims.
        """
        from hp_dtensor.spec import shown

        given = aliases
        if len(aliases) == 1 and isinstance(aliases[0], (list, tuple)):
            inner = aliases[0]
            if isinstance(inner, list) or any(isinstance(entry, Placement) for entry in inner):
                given = tuple(inner)
        if given and all(isinstance(entry, Placement) for entry in given):
            if len(given) != len(self._mesh.shape):
                raise ValueError(
                    f"got {len(given)} placements {shown(given)} for {self._mesh}; give one per mesh dim"
                )
            return _interned(self._mesh, given, None, None)
        return _interned(self._mesh, placements_of(self._mesh, given), len(given), None)

    # --------------------------------------------------------------------------------------------------------- what it says
    @property
    def mesh(self) -> DeviceMesh:
        """The mesh."""
        return self._mesh

    device_mesh = mesh

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Number of ranks along each mesh dim."""
        return tuple(self._mesh.shape)

    @property
    def alias_name(self) -> tuple[str, ...] | None:
        """The names of the mesh dims."""
        return self._mesh.mesh_dim_names

    mesh_dim_names = alias_name

    @property
    def rank_list(self) -> tuple[int, ...]:
        """The global ranks, row by row."""
        return tuple(self._mesh.rank_list)

    @property
    def ndim(self) -> int | None:
        """Number of dims of the tensors; None where placements alone say how they lie."""
        return self._ndim

    @property
    def placements(self) -> Placements:
        """One per mesh dim."""
        return self._placements

    @property
    def aliases(self) -> tuple[Alias, ...]:
        """One per tensor dim. ValueError if the number of dims is not known, or the mesh has no names."""
        return aliases_of(self._mesh, self._placements, self._known_ndim("aliases"))

    @property
    def alias_placements(self) -> Any:
        """The aliases where a tensor dim is cut by several mesh dims, else the placements; ``redistribute`` takes both."""
        if self._ndim is not None and not self.is_partial():
            aliases = self.aliases
            if any(isinstance(alias, tuple) for alias in aliases):
                return aliases
        return self._placements

    @property
    def tensor_map(self) -> tuple[int | tuple[int, ...], ...]:
        """Per tensor dim the mesh dim that cuts it, counted from the last one (0); -1 for none; a tuple for several."""
        return self.placement_to_tensor_map(self._known_ndim("tensor_map"))

    def placement_to_tensor_map(self, ndim: int) -> tuple[int | tuple[int, ...], ...]:
        """:attr:`tensor_map` for tensors with ``ndim`` dims."""
        last = len(self._mesh.shape) - 1
        entries = [tuple(last - i for i in stack) for stack in self._stacks(ndim)]
        return tuple(-1 if not entry else entry[0] if len(entry) == 1 else entry for entry in entries)

    def tensor_map_to_placement(self) -> Placements:
        """The placements again, from :attr:`tensor_map` and what is Partial."""
        last = len(self._mesh.shape) - 1
        groups = (entry if isinstance(entry, tuple) else (entry,) for entry in self.tensor_map)
        stacks = [tuple(last - axis for axis in group if axis != -1) for group in groups]
        partial = [p if isinstance(p, Partial) else REPLICATE for p in self._placements]
        return with_stacks(partial, stacks, self._mesh.shape)

    @property
    def compact_str(self) -> str:
        """A short text that is equal for equal layouts of one mesh."""
        return f"{self._mesh.shape}|{self.rank_list}|{self._placements!r}|{self._ndim}"

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values: mesh_shape, alias_name, rank_list, placements (as text), tensor_map, partial."""
        return {
            "mesh_shape": self.mesh_shape,
            "alias_name": self.alias_name,
            "rank_list": self.rank_list,
            "placements": [repr(p) for p in self._placements],
            "tensor_map": None if self._ndim is None else self.tensor_map,
            "partial": [p.reduce_op if isinstance(p, Partial) else None for p in self._placements],
        }

    # ------------------------------------------------------------------------------------------------------------ reductions
    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether it is Partial along any mesh dim; with ``reduce_op``: of that reduction."""
        return any(p.is_partial(reduce_op) for p in self._placements)

    def get_partial_by_dev_id(self, axis: str | int) -> str | None:
        """The reduction along a mesh dim, or None."""
        placement = self._placements[self._mesh_dim(axis)]
        return placement.reduce_op if isinstance(placement, Partial) else None

    def set_partial_by_dev_axis(self, axis: str | int, reduce_op: str) -> Layout:
        """The layout that is Partial along this mesh dim. ValueError if that cuts a tensor dim, or for an unknown reduction."""
        i, partial = self._mesh_dim(axis), Partial(reduce_op)
        if isinstance(self._placements[i], Shard):
            raise ValueError(
                f"mesh dim {axis!r} is {self._placements[i]}, so it cannot be {partial}: give a mesh dim that cuts no dim"
            )
        placements = (*self._placements[:i], partial, *self._placements[i + 1 :])
        return _interned(self._mesh, placements, self._ndim, self._meta)

    def reset_partial(self) -> Layout:
        """The layout with Replicate in the place of every Partial."""
        placements = tuple(REPLICATE if isinstance(p, Partial) else p for p in self._placements)
        return _interned(self._mesh, placements, self._ndim, self._meta)

    def set_tensor_meta(self, shape: Sequence[int], stride: Sequence[int] | None, dtype: Any) -> Layout:
        """The layout that also remembers these of a tensor: see :attr:`tensor_meta`."""
        meta = (tuple(shape), None if stride is None else tuple(stride), dtype)
        return _interned(self._mesh, self._placements, self._ndim, meta)

    @property
    def tensor_meta(self) -> tuple[Any, Any, Any] | None:
        """(shape, stride, dtype) of a tensor, if they were set."""
        return self._meta

    # ------------------------------------------------------------------------------------------------------- the layout as value
    def _mesh_dim(self, axis: str | int) -> int:
        names = self.alias_name or ()
        if isinstance(axis, str) and axis in names:
            return names.index(axis)
        if isinstance(axis, int) and 0 <= axis < len(self._mesh.shape):
            return axis
        raise ValueError(
            f"{axis!r} is no mesh dim; the mesh dims are {', '.join(names) or len(self._mesh.shape)}"
        )

    def __repr__(self) -> str:
        if self._ndim is not None and self.alias_name is not None and not self.is_partial():
            return f"Layout({self._mesh!r})({', '.join(map(repr, self.aliases))})"
        return f"Layout({self._mesh!r})({', '.join(map(repr, self._placements))})"

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Layout does not change; make another one instead of setting {name!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or (self._mesh == other._mesh and self._key() == other._key())

    def __hash__(self) -> int:
        return hash((self._mesh, self._key()))

    def _key(self) -> tuple[Any, ...]:
        return self._placements, self._ndim, self._meta

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: Any) -> Layout:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _interned, (self._mesh, *self._key())


def _interned(mesh: Any, placements: Sequence[Placement], ndim: int | None, meta: Any) -> Layout:
    from hp_dtensor.spec import resolve

    key = tuple(placements)
    if ndim is not None:
        key = resolve(mesh, key, ndim)
    found = mesh.interned.get(("layout", key, ndim, meta))
    if found is None:
        found = object.__new__(Layout)
        for name, value in (("_mesh", mesh), ("_placements", key), ("_ndim", ndim), ("_meta", meta)):
            object.__setattr__(found, name, value)
        mesh.interned["layout", key, ndim, meta] = found
    return found


def mesh_and_placements(device_mesh: Any, placements: Any) -> tuple[Any, Any]:
    """The arguments of a function that takes ``(device_mesh, placements)``, where either may be a Layout that says both.

    ValueError if a Layout is given beside other placements or another mesh.
    """
    if isinstance(device_mesh, Layout):
        if placements is not None:
            raise ValueError(f"{device_mesh!r} says the placements already; leave {placements!r} out")
        return device_mesh._mesh, device_mesh
    if isinstance(placements, Layout) and device_mesh is None:
        return placements._mesh, placements
    return device_mesh, placements


def plain_placements(mesh: Any, given: Any, ndim: int) -> Any:
    """A Layout or aliases as placements; anything else as it is. ValueError if they are of another mesh or number of dims."""
    if isinstance(given, Layout):
        if given._mesh is not mesh and given._mesh != mesh:
            raise ValueError(f"{given!r} is of another mesh than {mesh}: make the layout on that mesh")
        if given._ndim not in (None, ndim):
            raise ValueError(f"{given!r} is of tensors with {given._ndim} dims, the tensor has {ndim}")
        return given._placements
    if not are_aliases(given):
        return given
    if len(given) != ndim:
        raise ValueError(
            f"got {len(given)} aliases {tuple(given)} for a tensor with {ndim} dims; give one per tensor dim"
        )
    return placements_of(mesh, given)
