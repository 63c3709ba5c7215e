"""Among which ranks a unit shards, and among which it replicates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hp_dtensor import Placement, Replicate, Shard
from hp_platform.group import ProcessGroup
from hp_platform.mesh import DeviceMesh


@dataclass(frozen=True)
class Places:
    """The mesh of a unit, as far as its collectives need it."""

    mesh: DeviceMesh
    shard_group: ProcessGroup
    """Its ranks hold different pieces of every parameter."""
    replicate_group: ProcessGroup | None
    """Its ranks hold the same piece; None on a 1-D mesh."""
    device: str
    """Where shards and gathered parameters lie, such as ``"cuda:1"``."""

    def placements(self, dim: int | None) -> tuple[Placement, ...]:
        """Of a parameter: cut along ``dim`` over the last mesh dim, or (None) replicated."""
        last = Replicate() if dim is None else Shard(dim)
        return (*(Replicate() for _ in range(self.mesh.ndim - 1)), last)

    @cached_property
    def num_shards(self) -> int:
        """Pieces of every parameter."""
        return self.shard_group.size

    @cached_property
    def shard_rank(self) -> int:
        """Which piece this process holds."""
        return self.shard_group.rank


def find_places(mesh: DeviceMesh, device: str) -> Places:
    """The groups of a 1-D mesh (all ranks shard) or of a 2-D one (dim 0 replicates, dim 1 shards).

    ValueError for more dims, for a mesh without this process, and for one whose ranks do not ascend.
    """
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard takes a 1-D mesh (shard) or a 2-D mesh (replicate, shard), got {mesh.ndim} dims of sizes "
            f"{mesh.shape}: pass the sub-mesh of the data-parallel dims, such as mesh['dp']"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"this process is not in the mesh {mesh}: call fully_shard on the mesh's own ranks only"
        )
    for dim in range(mesh.ndim):
        positions = mesh.group_positions(dim)
        if positions != tuple(range(len(positions))):
            raise ValueError(
                f"the ranks along dim {dim} of the mesh must ascend, got {mesh.get_rank_list_along_axis(dim)}: "
                "collectives deliver by ascending rank"
            )
    return Places(
        mesh=mesh,
        shard_group=mesh.get_group(mesh.ndim - 1),
        replicate_group=mesh.get_group(0) if mesh.ndim == 2 else None,
        device=device,
    )


def small_group(places: Places, num_ranks: int) -> ProcessGroup:
    """``num_ranks`` neighbours within the shard group; asked for again, the same group."""
    mesh = places.mesh
    last, names = mesh.ndim - 1, mesh.mesh_dim_names
    new_names = (
        None if names is None else (f"{names[last]}_outer{num_ranks}", f"{names[last]}_inner{num_ranks}")
    )
    return mesh.unflatten(last, (places.num_shards // num_ranks, num_ranks), new_names).get_group(last + 1)
