"""What the styles of this package share: they leave parameters whole, and put something around a module's forward."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from hp_dtensor import ParallelStyle, Replicate
from hp_dtensor.module_tensors import is_dtensor
from hp_platform import get_platform
from hp_tp.styles.cutting import check_line
from hp_tp.styles.placing import place

Module = Any


class OverridingStyle(ParallelStyle):
    """A style by what runs in the place of a module's forward."""

    def check(self, module: Module, device_mesh: Any) -> None:
        """Raise what :meth:`apply` would raise, and change nothing."""
        check_line(device_mesh, type(self).__name__)
        self.forward_of(module, device_mesh)

    def apply(self, module: Module, device_mesh: Any) -> Module:
        """Lay out the module's own parameters, and run its forward within this style's. All ranks of the mesh call."""
        check_line(device_mesh, type(self).__name__)
        forward = self.forward_of(module, device_mesh)
        self.place(module, device_mesh)
        get_platform().override_forward(module, forward)
        return module

    @abstractmethod
    def forward_of(self, module: Module, mesh: Any) -> Callable[..., Any]:
        """What runs in the place of the module's forward. Raises what is wrong with the module, and changes nothing."""

    def place(self, module: Module, mesh: Any) -> None:
        """Make DTensors Replicate of the own parameters that are plain still."""
        own = get_platform().named_parameters(module, recurse=False, remove_duplicate=False)
        names = [name for name, parameter in own if not is_dtensor(parameter)]
        place(module, mesh, dict.fromkeys(names, Replicate()), self.src_data_rank)
