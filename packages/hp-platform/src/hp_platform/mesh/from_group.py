"""Meshes over process groups that the user or the framework has made."""

from __future__ import annotations

from typing import Any

from hp_platform import process_groups, subgroups
from hp_platform.group import ProcessGroup
from hp_platform.mesh.device_mesh import DeviceMesh
from hp_platform.mesh.place import shown
from hp_platform.platform import get_platform


def mesh_from_groups(given: Any, device_type: str, mesh: Any, names: tuple[str, ...] | None) -> DeviceMesh:
    """See :meth:`DeviceMesh.from_group`."""
    groups = [_ours(group) for group in (given if isinstance(given, (list, tuple)) else [given])]
    if not groups:
        raise ValueError("from_group needs at least one group, got an empty list")
    if mesh is None:
        if len(groups) > 1:
            raise ValueError(
                f"{len(groups)} groups do not say how their ranks are arranged; give mesh, with one dim per group"
            )
        mesh = list(groups[0].ranks)
    made = DeviceMesh(device_type, mesh, mesh_dim_names=names)
    if made.ndim != len(groups):
        raise ValueError(
            f"{made} has {made.ndim} dims, but {len(groups)} groups are given; give one group per dim"
        )
    for dim, group in enumerate(groups):
        line = tuple(sorted(made.get_rank_list_along_axis(dim)))
        if group.ranks != line:
            raise ValueError(
                f"dim {dim} of {made} joins rank {made.rank} with the ranks {shown(line)}, but its group is the "
                f"{group.describe()}; give the group of that dim that holds this rank"
            )
    known = process_groups.get_world().tables
    assert known is not None
    subgroups.mark_created_groups([group for group in groups if known.groups.get(group.ranks) is not group])
    return made


def _ours(group: Any) -> ProcessGroup:
    if isinstance(group, ProcessGroup):
        return group
    tables = process_groups.get_world().tables
    assert tables is not None
    ranks = tuple(sorted(get_platform().native_ranks(group)))
    known = tables.groups.get(ranks)
    if known is None or known.native is not group:
        subgroups.mark_created_groups(group)
    return subgroups.group_of(ranks)
