"""Meshes of ranks: :class:`DeviceMesh`, :func:`init_device_mesh`, :func:`get_current_mesh`.

In reading order: ``arithmetic`` (positions, coordinates, lines, without processes), ``checks`` (arguments), ``root`` (what a
mesh shares with those cut out of it), ``queries``, ``views`` (cutting), ``device_mesh`` (groups), ``init``, ``current``.
"""

from hp_platform.mesh.current import get_current_mesh
from hp_platform.mesh.device_mesh import DeviceMesh
from hp_platform.mesh.init import init_device_mesh

__all__ = ["DeviceMesh", "get_current_mesh", "init_device_mesh"]
