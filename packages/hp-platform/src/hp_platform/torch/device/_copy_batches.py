"""Many copies between addresses as one call of NVIDIA's driver: each call of its own costs the host 5 to 10 microseconds."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from typing import Any

_VERSION = 12080
"""Of CUDA, whose cuMemcpyBatchAsync is meant: drivers since then have this signature, newer ones beside another."""
_IN_ORDER_OF_STREAM = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream has come so far."""
_BESIDE_KERNELS = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: by copy engines."""


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes. The hints are for managed memory."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


COPY_BATCH = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # addresses of targets
    ctypes.c_void_p,  # addresses of sources
    ctypes.c_void_p,  # bytes of each
    ctypes.c_size_t,  # how many
    ctypes.POINTER(CopyAttributes),
    ctypes.POINTER(ctypes.c_size_t),  # from which copy on each of the attributes counts
    ctypes.c_size_t,  # how many attributes
    ctypes.POINTER(ctypes.c_size_t),  # the copy that was refused
    ctypes.c_void_p,  # stream
)
"""cuMemcpyBatchAsync, which gives a CUresult."""


class CopyBatches:
    """All copies of a batch are work of one stream, in any order among themselves."""

    def __init__(self, copy_batch: Callable[..., int], stream_of: Callable[[int], int]) -> None:
        """``copy_batch``: :data:`COPY_BATCH`; ``stream_of``: the address of a device's current stream, 0 where it takes no batches."""
        self._copy_batch: Callable[..., int] | None = copy_batch
        self._stream_of = stream_of
        self._attributes = CopyAttributes(_IN_ORDER_OF_STREAM, flags=_BESIDE_KERNELS)
        self._from_the_first, self._refused = ctypes.c_size_t(0), ctypes.c_size_t()

    def run(self, targets: int, sources: int, nbytes: int, count: int, device: int) -> bool:
        """Queue copies on the current stream of ``device``; the arguments are addresses of ``count`` numbers of 8 bytes each, which may
        change afterwards. False: nothing is queued that need not be queued again; copy one by one.
        """
        copy_batch = self._copy_batch  # another thread may give it up
        if copy_batch is None:
            return False
        stream = self._stream_of(device)
        if not stream:
            return False
        result = copy_batch(
            targets, sources, nbytes, count, self._attributes, self._from_the_first, 1, self._refused, stream
        )
        if result:
            self._copy_batch = None
            warnings.warn(
                f"the driver refused a batch of {count} copies (CUresult {result}): from now on they are copied one by one, "
                "which costs the host more",
                stacklevel=2,
            )
        return not result


def find_copy_batch() -> Any:
    """:data:`COPY_BATCH` of the driver; None without one, and of those that have not got it."""
    try:
        find = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2
    except (OSError, AttributeError):
        return None
    address, status = ctypes.c_void_p(), ctypes.c_int()
    find.argtypes = (
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_void_p,
    )
    result = find(b"cuMemcpyBatchAsync", ctypes.byref(address), _VERSION, 0, ctypes.byref(status))
    return COPY_BATCH(address.value) if not result and not status.value and address.value else None
