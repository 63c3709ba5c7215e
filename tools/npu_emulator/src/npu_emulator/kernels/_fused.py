"""Registration of CPU references for the fused npu:: operators.

A reference takes and returns CPU tensors. The autograd formulas stay those of torch_npu: they call the operators
whose names end in `_backward` or `_grad`, which are defined beside the forward ones.
"""

from collections.abc import Callable
from typing import Any

import torch

from npu_emulator.kernels import _streams
from npu_emulator.kernels._calls import calls
from npu_emulator.kernels._memory import argument_as_cpu, convert, device_of, to_npu

_library = torch.library.Library("npu", "IMPL")
_references: dict[str, Callable[..., Any]] = {}


def reference(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the kernel of `npu::name`."""

    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        _references[name] = function
        return function

    return keep


def install() -> None:
    for name, function in _references.items():
        _library.impl(name, _kernel(name, function), "PrivateUse1", allow_override=True)


def _kernel(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        calls[f"npu::{name}"] += 1
        _streams.wait_for_current_stream()
        device = device_of([*args, *kwargs.values()])
        result = function(
            *(convert(value, argument_as_cpu) for value in args),
            **{key: convert(value, argument_as_cpu) for key, value in kwargs.items()},
        )
        return convert(result, lambda r: to_npu(r.contiguous(), device) if isinstance(r, torch.Tensor) else r)

    return kernel
