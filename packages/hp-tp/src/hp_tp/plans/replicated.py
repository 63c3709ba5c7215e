"""``Replicated``: a module that every rank holds and computes whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hp_dtensor import ParallelStyle, Replicate
from hp_dtensor.module_tensors import is_dtensor
from hp_dtensor.nest import leaves
from hp_platform import get_platform
from hp_tp.styles.cutting import check_line
from hp_tp.styles.placing import local_of, place, run_with

Module = Any


class Replicated(ParallelStyle):
    """Keep a module whole: its own parameters become DTensors Replicate, equal on all ranks, and are trained as such.

    Called with plain tensors, which must be equal on all ranks, its forward runs on plain tensors, as in one process. Called
    with DTensors it runs on DTensors: right for any forward made of operations that DTensors know, and some microseconds slower
    per operation. Sub-modules are not touched.

    Communication: applying it, one broadcast per parameter (src_data_rank). A call with plain tensors: none; with a cut DTensor:
    in backward one all-reduce of each parameter's gradient, and what its operations need.
    """

    def apply(self, module: Module, device_mesh: Any) -> Module:
        """Replace the parameters, and let forward see them as its inputs lie."""
        check_line(device_mesh, "Replicated")
        place_whole(module, device_mesh, self.src_data_rank)
        get_platform().override_forward(module, WholeForward())
        return module


def place_whole(module: Module, mesh: Any, src_data_rank: int | None) -> None:
    """Make DTensors Replicate of the own parameters that are plain still."""
    own = get_platform().named_parameters(module, recurse=False, remove_duplicate=False)
    names = [name for name, parameter in own if not is_dtensor(parameter)]
    place(module, mesh, dict.fromkeys(names, Replicate()), src_data_rank)


@dataclass(frozen=True)
class WholeForward:
    """The forward of a module that is whole everywhere."""

    def __call__(
        self, module: Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if any(map(is_dtensor, leaves([args, kwargs]))):
            return own(*args, **kwargs)
        return run_with(module, own_pieces(module), own, args, kwargs)


def own_pieces(module: Module) -> dict[str, Any]:
    """This rank's pieces of the own parameters, as plain tensors that hand their gradients on."""
    platform = get_platform()
    return {
        name: local_of(platform.get_parameter(module, name))
        for name, _ in platform.named_parameters(module, recurse=False, remove_duplicate=False)
    }
