"""The current stream of the emulated device, as a CPU kernel sees it.

[Note: when compute happens] A CPU kernel runs on the calling thread. It first waits for the current stream, so it
reads what a kernel in that stream would read, and by default it writes at once. Then work on a side stream is never
late, and a program that forgets `wait_stream` still computes the right numbers. With NPU_EMULATOR_COMPUTE_DELAY_US
the results are written by the stream instead, after that delay: who reads them without waiting reads old memory.
Every operator then takes that long, since the next one on the stream waits for it.
"""

import ctypes
import os

import torch
import torch_npu

_runtime = ctypes.CDLL("libascendcl.so")  # the emulated one: it is already loaded under this name
_runtime.aclrtSynchronizeStream.argtypes = [ctypes.c_void_p]
_runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
_runtime.npu_emulator_enqueue_delay.argtypes = [ctypes.c_void_p, ctypes.c_long]
_runtime.npu_emulator_enqueue_delay.restype = None
_runtime.aclrtMemcpyAsync.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
]
_HOST_TO_DEVICE = 1  # ACL_MEMCPY_HOST_TO_DEVICE: the runtime copies the source before it returns

_compute_delay_us = int(os.environ.get("NPU_EMULATOR_COMPUTE_DELAY_US") or 0)

#: Whether results are written by the stream, see [Note: when compute happens].
writes_are_late = _compute_delay_us > 0


def _current() -> int:
    return torch_npu._C._npu_getCurrentRawStream(torch_npu._C._npu_getDevice())


def wait_for_current_stream() -> None:
    """Wait until the current stream has run everything it was given.

    Raises:
        RuntimeError: work on a stream has failed, such as a collective that other ranks did not join.
    """
    if _runtime.aclrtSynchronizeStream(_current()):
        raise RuntimeError(f"NPU stream failed: {(_runtime.aclGetRecentErrMsg() or b'').decode()}")


def write(target: torch.Tensor, source: torch.Tensor) -> None:
    """target[...] = source, both CPU tensors of one shape and type; late where that is asked for and possible."""
    if not writes_are_late or not target.numel():
        target.copy_(source)
        return
    if not target.is_contiguous():
        source = torch.empty_strided(target.size(), target.stride(), dtype=target.dtype).copy_(source)
        if not _is_dense(target):
            # The bytes in the gaps belong to others and cannot be copied along: written at once.
            target.copy_(source)
            return
    else:
        source = source.contiguous()
    size = target.numel() * target.element_size()
    stream = _current()
    _runtime.npu_emulator_enqueue_delay(stream, _compute_delay_us)
    _runtime.aclrtMemcpyAsync(target.data_ptr(), size, source.data_ptr(), size, _HOST_TO_DEVICE, stream)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
