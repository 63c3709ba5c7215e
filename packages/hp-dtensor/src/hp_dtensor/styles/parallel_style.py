"""What a parallel style is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class ParallelStyle(ABC):
    """One way to lay out a module over a mesh: its parameters, and what is done at its doors.

    [Note: the protocol of styles] A style is any object with ``apply(module, device_mesh)``. It declares placements and
    installs hooks, and returns the module to stand in the module's place: the same one (also meant by None), or another. It
    keeps no state between calls of the module, so one style object may serve many modules. Two attributes are read if they
    are there: ``num_mesh_dims``, the number of dims of the meshes that it takes (1 if it does not say, None for any), and
    ``src_data_rank``, which :func:`parallelize_module` sets. It may have ``check(module, device_mesh)``, which raises what
    ``apply`` would raise and changes nothing: it is asked for all modules of a plan before the first one is changed. And it may have
    ``lays_out(module)``, which gives the modules whose parameters ``apply`` makes DTensors and takes plain ones for: two styles of a
    plan that would both do that are refused as early. This class is only a convenience for writing one::

        class ShardRows(ParallelStyle):
            def apply(self, module, device_mesh):
                return distribute_module(module, device_mesh, partition_fn=shard_rows)
    """

    num_mesh_dims: int | None = 1
    """Number of dims of the meshes that the style takes; None: any."""
    src_data_rank: int | None = 0
    """Whose values of a parameter count: see ``distribute_tensor``. None: every rank's own, which must be equal."""

    @abstractmethod
    def apply(self, module: Any, device_mesh: Any) -> Any:
        """Lay out ``module`` on ``device_mesh``; returns it, or the module to stand in its place. All ranks call."""
