"""The mesh that a ``with mesh:`` block has made current."""

from __future__ import annotations

from hp_platform import _process
from hp_platform.mesh.device_mesh import DeviceMesh


def get_current_mesh() -> DeviceMesh:
    """The innermost mesh entered in this thread (and asynchronous task); threads start with none.

    RuntimeError if none is entered.
    """
    stack = _process.mesh_stack.get()
    if not stack:
        raise RuntimeError("no mesh is current: enter one (`with mesh:`), or hand it over as an argument")
    return stack[-1]
