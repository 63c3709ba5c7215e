"""``distribute_module``: a module's parameters become DTensors by a function of the user."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from hp_dtensor.creation import check_mesh
from hp_dtensor.module_tensors import keep_ties, mark_replaced, parameter_places, replicate_rest
from hp_platform import get_current_mesh, get_platform

M = TypeVar("M")
_DISTRIBUTED = "_hp_dtensor_distributed"


def distribute_module(
    module: M,
    device_mesh: Any = None,
    partition_fn: Callable[[str, Any, Any], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> M:
    """Make every parameter and buffer of a module a DTensor, in place; returns the module. All ranks of the mesh call.

    Args:
        module: whose values are equal on all ranks.
        device_mesh: where it lies; default: the current mesh (``with mesh:``).
        partition_fn: ``partition_fn(name, submodule, mesh)`` for the module and each sub-module, with its full name (``""``
            for the module itself); it puts DTensors in the place of parameters. What it leaves plain is replicated. One
            parameter in several places stays one: see :mod:`hp_dtensor.module_tensors`.
        input_fn: ``input_fn(module, inputs, mesh)`` before forward, ``inputs`` the tuple of positional arguments; what it
            returns takes their place, unless it is None.
        output_fn: ``output_fn(module, output, mesh)`` after forward; likewise.

    Both are also taken without ``module``, with a FutureWarning, as in older versions of torch.distributed.tensor.

    Communication: none but what the functions do. TypeError if ``module`` is no module; ValueError for a function with
    another number of arguments, and if one parameter was given different placements in two places; RuntimeError for a
    module that is distributed already.
    """
    platform = get_platform()
    if not platform.is_module(module):
        raise TypeError(f"distribute_module takes a module, got {type(module).__name__}")
    mesh: Any = get_current_mesh() if device_mesh is None else device_mesh
    check_mesh(mesh)
    if getattr(module, _DISTRIBUTED, False):
        raise RuntimeError(
            f"this {type(module).__name__} is distributed already: call distribute_module once, with all functions"
        )
    before = None if input_fn is None else _Call(input_fn, mesh, _takes_module(input_fn, "input_fn"))
    after = None if output_fn is None else _Call(output_fn, mesh, _takes_module(output_fn, "output_fn"))
    places = parameter_places(module)
    if partition_fn is not None:
        for name, submodule in list(platform.named_modules(module)):
            partition_fn(name, submodule, mesh)
        keep_ties(places)
    replicate_rest(module, mesh)
    mark_replaced(places, "distribute_module")
    if before is not None:
        platform.register_forward_pre_hook(module, before.on_inputs)
    if after is not None:
        platform.register_forward_hook(module, after.on_output)
    setattr(module, _DISTRIBUTED, True)
    return module


@dataclass(frozen=True)
class _Call:
    """A function of the user as a hook. Its methods can be copied with the module, as closures cannot."""

    function: Callable[..., Any]
    mesh: Any
    takes_module: bool

    def on_inputs(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        result = self._call(module, args)
        if result is None:
            return args, kwargs
        return (result if isinstance(result, tuple) else (result,)), kwargs

    def on_output(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        result = self._call(module, output)
        return output if result is None else result

    def _call(self, module: Any, value: Any) -> Any:
        if self.takes_module:
            return self.function(module, value, self.mesh)
        return self.function(value, self.mesh)


def _takes_module(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    by_position = [
        p for p in parameters if p.kind in (inspect.Parameter.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return True
    required = sum(p.default is inspect.Parameter.empty for p in by_position)
    if required <= 3 <= len(by_position):
        return True
    if required <= 2 <= len(by_position):
        warnings.warn(
            f"{name} with two arguments (inputs, mesh) is the old form: take (module, inputs, mesh)",
            FutureWarning,
            stacklevel=3,
        )
        return False
    what = "inputs" if name == "input_fn" else "output"
    raise ValueError(
        f"{name} must take (module, {what}, mesh), got a function with {len(by_position)} arguments by position"
    )
