"""Parameters become DTensors on the mesh, and are shown to forward as this rank's pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hp_dtensor import Placement, distribute_tensor
from hp_dtensor.dtensor import DTensorMethods
from hp_platform import get_platform
from hp_tp.styles import moves
from hp_tp.styles.door import Door

Tensor = Any
Module = Any


def check_unplaced(module: Module, style: str) -> None:
    """ValueError if a style has laid out this module before."""
    for name, parameter in get_platform().named_parameters(module, recurse=False, remove_duplicate=False):
        if isinstance(parameter, DTensorMethods):
            raise ValueError(
                f"{style}: parameter {name!r} of this {type(module).__name__} is a DTensor of {parameter._spec} already: "
                f"apply one style to it, and before fully_shard"
            )


def place(module: Module, mesh: Any, placements: Mapping[str, Placement], src_data_rank: int | None) -> None:
    """Cut the module's own parameters. Communication: that of ``distribute_tensor``."""
    platform: Any = get_platform()
    for name, parameter in list(platform.named_parameters(module, recurse=False, remove_duplicate=False)):
        placed = distribute_tensor(
            platform.detach(parameter), mesh, [placements[name]], src_data_rank=src_data_rank
        )
        platform.set_parameter(
            module, name, platform.parameter(placed, requires_grad=platform.requires_grad(parameter))
        )


def local_of(x: Any) -> Any:
    """This rank's piece of what stands in a parameter's place: of a DTensor, or a plain tensor, which is taken for the piece."""
    return x._local if isinstance(x, DTensorMethods) else x


def summed_over(whole: Tensor, door: Door) -> Tensor:
    """A whole local parameter for a forward that differs between ranks: their gradients are added up by one all-reduce."""
    platform = get_platform()
    if door.mesh.shape[0] == 1 or not (platform.is_grad_enabled() and platform.requires_grad(whole)):
        return whole
    return moves.mark(whole, door)


def run_with(
    module: Module, shown: Mapping[str, Any], own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``own(*args, **kwargs)`` while other values stand in the places of parameters."""
    platform = get_platform()
    before = {name: platform.get_parameter(module, name) for name in shown}
    try:
        for name, value in shown.items():
            platform.set_parameter(module, name, value)
        return own(*args, **kwargs)
    finally:
        for name, value in before.items():
            platform.set_parameter(module, name, value)
