"""Where a style acts on a module: the mesh dim, and how plain inputs are to be understood."""

from __future__ import annotations

from typing import Any, NamedTuple

from hp_dtensor import Placement
from hp_dtensor.running_module import running_module
from hp_platform import get_platform
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


def refused(what: str, why: str) -> ValueError:
    """The error of a call that cannot be: it says which module of which model was called."""
    where = "" if get_platform().is_compiling() else running_module()
    return ValueError(f"{what}: {why}{where}")
