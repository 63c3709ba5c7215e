"""NPU memory is host memory here, so an NPU tensor can be seen as a CPU tensor of the same bytes."""

import ctypes
from typing import Any

import torch

from npu_emulator.kernels import _streams

_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_memory_view.restype = ctypes.py_object
_WRITABLE = 0x200  # PyBUF_WRITE


#: By address and size: a storage over that host memory. One says nothing of who owns the memory or whether it is there,
#: so it is right for whatever lies there later; making one anew for every argument took a tenth of an operator's time.
_storages: dict[tuple[int, int], torch.UntypedStorage] = {}
_MOST_STORAGES = 4096


def is_npu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def as_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of an NPU tensor; valid as long as that tensor lives."""
    if tensor.device.type != "npu":
        return tensor
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if not size:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    view = torch.empty(0, dtype=tensor.dtype)
    return view.set_(
        _host_storage(storage.data_ptr(), size), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def _host_storage(address: int, size: int) -> torch.UntypedStorage:
    found = _storages.get((address, size))
    if found is None:
        if len(_storages) >= _MOST_STORAGES:
            _storages.clear()
        memory = torch.frombuffer(_memory_view(address, size, _WRITABLE), dtype=torch.uint8)
        found = _storages[address, size] = memory.untyped_storage()
    return found


def to_npu(result: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A new NPU tensor with the value and the strides of a CPU result."""
    if result.device.type != "cpu":
        return result
    created = torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device=device)
    if result.numel():
        _streams.write(as_cpu(created), result)
    return created


def convert(value: Any, change: Any) -> Any:
    """Apply `change` to a value and inside lists and tuples: all that an operator's schema can hold."""
    if type(value) in (list, tuple):
        return type(value)(convert(element, change) for element in value)
    return change(value)


def argument_as_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return as_cpu(value)
    if isinstance(value, torch.device) and value.type == "npu":
        return torch.device("cpu")
    return value


def device_of(values: Any) -> torch.device:
    """The NPU that the arguments name, else the current one."""
    for value in values:
        if isinstance(value, (list, tuple)):
            for element in value:
                if is_npu(element):
                    return element.device
        elif is_npu(value):
            return value.device
        elif isinstance(value, torch.device) and value.type == "npu" and value.index is not None:
            return value
    return torch.device("npu", torch.npu.current_device())
