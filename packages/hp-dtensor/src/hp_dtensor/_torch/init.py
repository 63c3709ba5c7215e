"""Deferred initialisation on PyTorch: registration on a device, memory for what has none, modules' own initialisers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.modules import module as registration

from hp_dtensor.module_tensors import PIECE_DEVICE
from hp_dtensor.rng.places import is_dtensor
from hp_dtensor.rng.stream import global_draws
from hp_platform import get_platform


@contextmanager
def registering_on(device: Any, include_buffers: bool) -> Iterator[None]:
    """See :func:`hp_dtensor.init.contexts.init_on_device`."""
    wanted = torch.device(device)
    with ExitStack() as stack:
        hook = registration.register_module_parameter_registration_hook(_Moving(wanted))
        stack.callback(hook.remove)
        if include_buffers:
            stack.enter_context(wanted)
        yield


class _Moving:
    """The hook of a block: brings parameters to its device as they are registered."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, module: torch.nn.Module, name: str, parameter: Any) -> Any:
        blocks = [
            h for h in registration._global_parameter_registration_hooks.values() if isinstance(h, _Moving)
        ]
        if blocks[-1] is not self or parameter.device == self._device or is_lazy(parameter):
            return None  # the innermost block counts
        made = torch.nn.Parameter(parameter.detach().to(self._device), requires_grad=parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        return made


def is_lazy(x: torch.Tensor) -> bool:
    """Whether its shape is not known yet (torch's lazy modules)."""
    return isinstance(x, torch.nn.parameter.UninitializedTensorMixin)


def local_of(x: torch.Tensor) -> torch.Tensor:
    """The tensor with this rank's values."""
    local: torch.Tensor = x._local if is_dtensor(x) else x
    return local


def is_deferred(x: torch.Tensor) -> bool:
    """Whether it waits for memory."""
    return local_of(x).is_meta and not is_lazy(x)


def device_of_meshes(tensors: Sequence[Any]) -> str:
    """The device of the first DTensor's mesh, else the default one."""
    for x in tensors:
        if is_dtensor(x):
            return get_platform().device(x.device_mesh.device_type).current()
    default = torch.get_default_device()
    return "cpu" if default.type == "meta" else str(default)


def materialise(x: torch.Tensor, device: str) -> None:
    """Memory for the piece of this rank, under the same object; floating dtypes hold NaN until they are written."""
    local = local_of(x)
    if is_dtensor(x):
        device = getattr(x, PIECE_DEVICE, None) or get_platform().device(x.device_mesh.device_type).current()
    made = torch.empty_like(local, device=device, requires_grad=False)
    if made.is_floating_point():
        get_platform().fill_(made, float("nan"))
    made.requires_grad_(local.requires_grad)
    if is_dtensor(x):
        x._local = made
        x._replace(x._spec)
    elif isinstance(x, torch.nn.Parameter):
        parameter = torch.nn.Parameter(made.detach(), requires_grad=made.requires_grad)
        parameter.__dict__.update(x.__dict__)
        torch.utils.swap_tensors(x, parameter)
    else:
        torch.utils.swap_tensors(x, made)


def is_written(x: torch.Tensor) -> bool:
    """Whether values were written since :func:`materialise`; of a piece without elements it is not known, so it counts as yes."""
    local = local_of(x).detach()
    if local.numel() == 0:
        return True
    if local.is_floating_point():
        return not bool(local.isnan().any())
    return local._version > 0


def draws() -> AbstractContextManager[None]:
    """In which torch's own functions draw from the stream, also on plain tensors."""
    return global_draws()


def initialises(module: torch.nn.Module, attribute: str | None) -> bool:
    """Whether the module gives values to its tensor of this name; None: to those of modules in it."""
    return _method(module) is not None


def initialiser_of(module: torch.nn.Module, given: Collection[str]) -> Callable[[], object]:
    """What gives its tensors their first values."""
    method = _method(module)
    assert method is not None
    return method


def _method(module: torch.nn.Module) -> Callable[[], object] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method):
            return method
    return None


def copy_of(x: torch.Tensor) -> torch.Tensor:
    """This rank's values."""
    return local_of(x).detach().clone()


def put_back(x: torch.Tensor, values: torch.Tensor) -> None:
    """Write this rank's values."""
    get_platform().copy_(local_of(x), values)
