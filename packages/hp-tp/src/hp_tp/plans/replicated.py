"""``Replicated``: a module that every rank holds and computes whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hp_dtensor import DTensor, Replicate
from hp_dtensor.module_tensors import is_dtensor
from hp_dtensor.nest import leaves, map_leaves
from hp_platform import get_platform
from hp_tp.plans.overriding import OverridingStyle
from hp_tp.styles.cutting import check_flag
from hp_tp.styles.placing import local_of, run_with

Module = Any


class Replicated(OverridingStyle):
    """Keep a module whole: its own parameters become DTensors Replicate, equal on all ranks, and are trained as such.

    Called with plain tensors, which must be equal on all ranks, its forward runs on plain tensors, as in one process. Called
    with DTensors it runs on DTensors: right for any forward made of operations that DTensors know, and some microseconds slower
    per operation. Sub-modules are not touched.

    Args:
        use_local_output: whether the result of plain tensors is handed out as a plain tensor (default), or as a DTensor Replicate, for
            modules whose result meets DTensors.

    Communication: applying it, one broadcast per parameter (src_data_rank). A call with plain tensors: none; with a cut DTensor:
    in backward one all-reduce of each parameter's gradient, and what its operations need.
    """

    def __init__(self, *, use_local_output: bool = True) -> None:
        self.use_local_output = check_flag(use_local_output, "Replicated: use_local_output")

    def forward_of(self, module: Module, mesh: Any) -> Callable[..., Any]:
        """Let forward see the parameters as its inputs lie."""
        return WholeForward(None if self.use_local_output else mesh)


@dataclass(frozen=True)
class WholeForward:
    """The forward of a module that is whole everywhere."""

    mesh: Any
    """Where plain results become DTensors; None: they stay plain."""

    def __call__(
        self, module: Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if any(map(is_dtensor, leaves([args, kwargs]))):
            return own(*args, **kwargs)
        result = run_with(module, own_pieces(module), own, args, kwargs)
        return result if self.mesh is None else map_leaves(self._placed, result)

    def _placed(self, x: Any) -> Any:
        if not get_platform().is_tensor(x):
            return x
        return DTensor.from_local(x, self.mesh, [Replicate()], shape=tuple(x.shape))


def own_pieces(module: Module) -> dict[str, Any]:
    """This rank's pieces of the own parameters, as plain tensors that hand their gradients on."""
    platform = get_platform()
    return {
        name: local_of(platform.get_parameter(module, name))
        for name, _ in platform.named_parameters(module, recurse=False, remove_duplicate=False)
    }
