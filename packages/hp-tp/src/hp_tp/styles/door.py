"""Where a style acts on a module: the mesh dim, and how plain inputs are to be understood."""

from __future__ import annotations

from typing import Any, NamedTuple

from hp_dtensor import Placement
from hp_platform.collectives.traced import TracedGroup, traced_group


class Door(NamedTuple):
    """A module's door."""

    mesh: Any
    """Of one dim."""
    layout: Placement
    """How a plain input lies."""
    uneven: bool
    """Whether plain pieces may be of other sizes on other ranks, which are asked then."""
    what: str
    """For messages."""
    traced: TracedGroup | None = None
    """The mesh's group in compiled code; None where nothing is compiled."""


def make_door(mesh: Any, layout: Placement, uneven: bool, what: str) -> Door:
    """The door of a module on this mesh."""
    return Door(mesh, layout, uneven, what, traced_group(mesh.get_group(0)))
