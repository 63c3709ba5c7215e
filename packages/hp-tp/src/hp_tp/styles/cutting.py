"""What the styles that cut parameters share: their options, and how they are applied to a module."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from hp_dtensor import ParallelStyle, Placement, Shard
from hp_dtensor.creation import check_mesh
from hp_platform import get_platform
from hp_tp.overlap.policy import policy_of
from hp_tp.styles.cuts import ModuleCuts, cuts_of
from hp_tp.styles.door import Door, make_door
from hp_tp.styles.placing import check_unplaced

Module = Any


class CuttingStyle(ParallelStyle):
    """Base of ColwiseParallel and RowwiseParallel."""

    style: str
    """As the protocol of cuts calls it."""
    known: Mapping[str, Callable[[Module], ModuleCuts]]
    """How layers of the framework are cut, by their kind."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        heads: Any = None,
        cuts: ModuleCuts | None = None,
        uneven: bool = False,
        overlap: Any = False,
    ) -> None:
        name = type(self).__name__
        self.input_layouts = check_layout(input_layouts, f"{name}: input_layouts")
        self.output_layouts = check_layout(output_layouts, f"{name}: output_layouts")
        self.use_local_output = check_flag(use_local_output, f"{name}: use_local_output")
        self.heads, self.cuts = heads, cuts
        self.uneven = check_flag(uneven, f"{name}: uneven")
        self.overlap = policy_of(overlap, name)

    def check(self, module: Module, device_mesh: Any) -> None:
        """Raise what :meth:`apply` would raise, and change nothing."""
        self._planned(module, device_mesh)

    def lays_out(self, module: Module) -> list[Module]:
        """The modules whose parameters become DTensors."""
        return [module]

    def apply(self, module: Module, device_mesh: Any) -> Module:
        """Cut the module's parameters and let it run on this rank's pieces. All ranks of the mesh call."""
        forward = self._planned(module, device_mesh)
        self.place(module, forward)
        get_platform().override_forward(module, forward)
        return module

    def _planned(self, module: Module, mesh: Any) -> Any:
        name = type(self).__name__
        check_line(mesh, name)
        check_unplaced(module, name)
        cuts = cuts_of(module, self.style, self.cuts, self.known)
        return self.forward_of(module, mesh, cuts, f"{name} of {type(module).__name__}")

    @abstractmethod
    def forward_of(self, module: Module, mesh: Any, cuts: ModuleCuts, what: str) -> Any:
        """What will run in the place of the module's forward. ValueError for a module that cannot be laid out so."""

    @abstractmethod
    def place(self, module: Module, forward: Any) -> None:
        """Let the module's parameters be DTensors, as this forward needs them."""

    def runs_linear(self, module: Module, cuts: ModuleCuts, what: str) -> bool:
        """Whether the framework's own linear, cut as usual, is all that forward does. ValueError if only that could overlap."""
        platform = get_platform()
        is_linear = platform.layer_kind(module) == "linear" and platform.has_stock_forward(module)
        if is_linear:
            usual = self.known["linear"](module)
            is_linear = cuts == cuts_of(module, self.style, usual, self.known)
        if self.overlap is not None and not is_linear:
            raise ValueError(
                f"{what}: overlap=True is for linear layers with the framework's own forward: leave it out for this module"
            )
        return is_linear

    def check_overlap(self, layout: Placement, option: str, what: str) -> None:
        """ValueError if with this layout there is no communication that a product could overlap."""
        if self.overlap is not None and (not isinstance(layout, Shard) or layout.dim == -1):
            raise ValueError(
                f"{what}: overlap=True is for tensors that are cut along rows, got {option}={layout}: say which dim is cut, such "
                f"as Shard(1), or leave overlap out"
            )

    def door(self, mesh: Any, layout: Placement, what: str) -> Door:
        """Where the module's inputs arrive."""
        return make_door(
            mesh, layout if self.input_layouts is None else self.input_layouts, self.uneven, what
        )


def check_layout(layout: Any, what: str) -> Placement | None:
    """A placement, or None; torch's tuples of one are taken, too."""
    if isinstance(layout, (tuple, list)) and len(layout) == 1:
        (layout,) = layout
    if layout is None or isinstance(layout, Placement):
        return layout
    raise ValueError(f"{what} must be a placement such as Shard(1) or Replicate(), got {layout!r}")


def check_flag(flag: Any, what: str) -> bool:
    """True or False."""
    if not isinstance(flag, bool):
        raise ValueError(f"{what} must be True or False, got {flag!r}")
    return flag


def check_line(mesh: Any, style: str) -> None:
    """ValueError unless it is a mesh of one dim."""
    check_mesh(mesh)
    if len(mesh.shape) != 1:
        raise ValueError(
            f"{style} takes a mesh of one dim, got {mesh} of shape {tuple(mesh.shape)}; slice it by name, such as mesh['tp']"
        )
    if mesh.get_coordinate() is None:
        raise RuntimeError(
            f"{style}: this rank is not in {mesh}, so it holds no part of the module: lay it out on ranks of the mesh only"
        )
