"""The other notation for placements: one entry per tensor dim, the names of the mesh dims that cut it.

An entry is a name, ``"None"`` for a dim that is not cut, or a tuple of names of which the leftmost makes the outermost cut.
Every order of cuts can be written so; a Partial cannot, and has its own place in a :class:`hp_dtensor.Layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor.cuts import Stack, stacks_of, with_stacks
from hp_dtensor.placements import REPLICATE, Placement

UNSHARDED = "None"
Alias = str | tuple[str, ...]


def are_aliases(entries: Any) -> bool:
    """Whether a sequence is in this notation: no entry is a placement, and one is a name or a tuple."""
    return (
        isinstance(entries, (list, tuple))
        and any(isinstance(entry, (str, tuple)) for entry in entries)
        and not any(isinstance(entry, Placement) for entry in entries)
    )


def placements_of(mesh: Any, aliases: Sequence[Alias]) -> tuple[Placement, ...]:
    """The placements that aliases stand for. ValueError for what is no name of a mesh dim, or is used twice."""
    names = getattr(mesh, "mesh_dim_names", None)
    if names is None:
        raise ValueError(
            f"aliases {tuple(aliases)} are names of mesh dims, but the mesh of shape {tuple(mesh.shape)} has none: make "
            f"it with mesh_dim_names, or give placements"
        )
    stacks: list[Stack] = []
    used: set[str] = set()
    for entry in aliases:
        group = (entry,) if isinstance(entry, str) else entry
        if not isinstance(group, tuple) or not all(isinstance(name, str) for name in group):
            raise ValueError(
                f"an alias is the name of a mesh dim, 'None', or a tuple of names, got {entry!r} in {tuple(aliases)}"
            )
        stack = []
        for name in group:
            if name == UNSHARDED:
                continue
            if name not in names:
                raise ValueError(f"alias {name!r} is no mesh dim; the mesh dims are {', '.join(names)}")
            if name in used:
                raise ValueError(
                    f"alias {name!r} is used twice in {tuple(aliases)}: a mesh dim cuts one tensor dim"
                )
            used.add(name)
            stack.append(names.index(name))
        stacks.append(tuple(stack))
    return with_stacks((REPLICATE,) * len(names), stacks, mesh.shape)


def aliases_of(mesh: Any, placements: Sequence[Placement], ndim: int) -> tuple[Alias, ...]:
    """The aliases of resolved placements; what is Partial is not said by them."""
    names = getattr(mesh, "mesh_dim_names", None)
    if names is None:
        raise ValueError(
            f"{mesh} has no names of dims, so nothing can be written with aliases; make it with mesh_dim_names"
        )
    entries: list[Alias] = []
    for stack in stacks_of(placements, mesh.shape, ndim):
        group = tuple(names[i] for i in stack)
        entries.append(UNSHARDED if not group else group[0] if len(group) == 1 else group)
    return tuple(entries)
