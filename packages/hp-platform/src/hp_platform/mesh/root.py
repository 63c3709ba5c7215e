"""What a root mesh and all meshes cut out of it share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hp_platform.mesh import arithmetic, checks, place

if TYPE_CHECKING:
    from hp_platform.mesh.device_mesh import DeviceMesh

ViewKey = tuple["tuple[str, ...] | None", arithmetic.Dims, int]
"""Names, dims, base: a sub-mesh of the root."""


@dataclass(eq=False)
class RootState:
    """The root's ranks, this process among them, and tables of what was cut out of it."""

    device_type: str
    ranks: tuple[int, ...]
    """Global ranks by position."""
    rank: int | None
    """Global rank of this process; None only after unpickling in a process that has none."""
    init_backend: bool
    """Whether asking for a group may make the world."""
    names: tuple[str, ...] | None
    dims: arithmetic.Dims
    views: dict[ViewKey, DeviceMesh] = field(default_factory=dict)
    """Every mesh cut out of the root, and the root itself: asked for twice, it is the same object."""
    flattened: dict[str, arithmetic.Dim] = field(default_factory=dict)
    """Names given by ``flatten``."""
    position_of: dict[int, int] = field(init=False)
    """Global rank -> position."""

    def __post_init__(self) -> None:
        self.position_of = {rank: position for position, rank in enumerate(self.ranks)}

    @property
    def position(self) -> int | None:
        """Position of this process; None if the root does not hold it."""
        return None if self.rank is None else self.position_of.get(self.rank)

    def register(self, name: str, dim: arithmetic.Dim) -> None:
        """Let ``root[name]`` mean ``dim``. ValueError if the name means something else already."""
        if self.names is not None and name in self.names:
            raise ValueError(
                f"flatten cannot name its dim {name!r}: the root mesh has a dim of that name; give another mesh_dim_name"
            )
        known = self.flattened.setdefault(name, dim)
        if known != dim:
            raise ValueError(
                f"flatten cannot name its dim {name!r}: that name stands for the flattened dims ({self.describe(known)}), "
                f"not ({self.describe(dim)}); give another mesh_dim_name"
            )

    def describe(self, dim: arithmetic.Dim) -> str:
        """The root dims that a dim is made of, for messages."""
        roots = sorted({factor.root_dim for factor in dim})
        return ", ".join(str(root) if self.names is None else self.names[root] for root in roots)

    def resolve(self, names: tuple[str, ...]) -> arithmetic.Dims:
        """The dims that names mean on the root, where those of flattened dims count too.

        KeyError for an unknown name; RuntimeError for dims that overlap; NotImplementedError for a flattened dim among
        others whose ranks do not follow each other in equal steps; ValueError for names out of the root's order.
        """
        assert self.names is not None
        own = dict(zip(self.names, self.dims, strict=True))
        for name in names:
            if name not in own and name not in self.flattened:
                known = ", ".join([*self.names, *self.flattened])
                raise KeyError(f"no dim is named {name!r}; the dims, flattened ones included, are {known}")
        found = [own[name] if name in own else self.flattened[name] for name in names]
        if len(set(names)) != len(names):
            raise ValueError(f"mesh[{names}] names a dim twice; give each once")
        refuse_overlap(names, found, self)
        for name, dim in zip(names, found, strict=True):
            if len(names) > 1 and not arithmetic.merges(dim):
                raise NotImplementedError(
                    f"on every framework and device, a slice with several dims takes only flattened dims whose ranks follow "
                    f"each other in equal steps; {name!r} is made of ({self.describe(dim)}), between which other dims lie. "
                    f"Slice {name!r} alone, or build the mesh by DeviceMesh.concatenate"
                )
        if sorted(found, key=arithmetic.order_key) != found:
            right = tuple(
                name for _, name in sorted(zip(map(arithmetic.order_key, found), names, strict=True))
            )
            raise ValueError(f"mesh[{names}] does not keep the mesh's order of dims; write mesh[{right}]")
        return tuple(found)


def refuse_overlap(names: tuple[str, ...], dims: list[arithmetic.Dim], state: RootState) -> None:
    """RuntimeError if two of the dims share a root dim."""
    for index, dim in enumerate(dims):
        for before in range(index):
            if arithmetic.overlap(dims[before], dim):
                raise RuntimeError(
                    f"dims {names[before]!r} and {names[index]!r} overlap: they are made of "
                    f"({state.describe(dims[before])}) and ({state.describe(dim)}); a mesh holds each dim once"
                )


def new_state(
    device_type: str,
    shape: tuple[int, ...],
    ranks: tuple[int, ...],
    names: tuple[str, ...] | None,
    *,
    rank: int | None,
    init_backend: bool,
) -> RootState:
    """The state of a new root; the arguments have been checked."""
    dims = arithmetic.row_major(shape, virtual_last=checks.is_virtual_last(names))
    assert len(ranks) == len(arithmetic.positions(dims, 0)), f"{place.shown(ranks)} do not fill {shape}"
    return RootState(device_type, ranks, rank, init_backend, names, dims)


def cache_key(state: RootState) -> Any:
    """Under which key a root hangs on the world."""
    return state.device_type, arithmetic.shape_of(state.dims), state.names, state.ranks
