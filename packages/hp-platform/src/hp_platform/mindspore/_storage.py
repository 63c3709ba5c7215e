"""The memory below tensors of MindSpore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
from mindspore import mint, ops
from mindspore.utils import dlpack

from hp_platform.mindspore import _private
from hp_platform.protocols.storage import StoragePlace

_PLAIN = (mindspore.Tensor, mindspore.Parameter)


class MindSporeStorageOps:
    """Those of :class:`hp_platform.protocols.TensorOps` that free, alias or exchange memory, and :class:`hp_platform.protocols.StorageOps`."""

    def storage_nbytes(self, x: mindspore.Tensor) -> int:
        """Bytes of the whole storage."""
        return 0 if x.is_meta else x.untyped_storage().size()

    def resize_storage_(self, x: mindspore.Tensor, nbytes: int) -> None:
        """Free or get back the memory."""
        x.untyped_storage().resize_(nbytes)

    def data_ptr(self, x: mindspore.Tensor) -> int:
        """Address of the first element."""
        return x.data_ptr()

    def stand_in(
        self,
        shape: Sequence[int],
        dtype: Any,
        device: str,
        get: Callable[[], mindspore.Tensor],
        linear: Any = None,
    ) -> mindspore.Tensor:
        """Not here: functions in C++ ask no subclass of Tensor."""
        raise NotImplementedError(
            f"MindSpore {mindspore.__version__} asks no tensor before a function runs, so nothing can stand in for one: make "
            "the tensor itself"
        )

    def alias(self, x: mindspore.Tensor) -> mindspore.Tensor:
        """The same memory under a storage of its own."""
        if not x.is_contiguous():
            raise ValueError(
                f"alias needs a contiguous tensor, got shape {tuple(x.shape)}, strides {tuple(x.stride())}"
            )
        if x.size == 0:
            return mint.empty(x.shape, dtype=x.dtype)
        # DLPack hands over address, shape and an owner to keep alive, and knows no storage: the importer makes a new one.
        # As bytes, because MindSpore does not hand over every dtype.
        row = ops.stop_gradient(x).view((x.size,)).view(mindspore.uint8)
        return dlpack.from_dlpack(dlpack.to_dlpack(row)).view(x.dtype).view(x.shape)

    def storage_place(self, x: mindspore.Tensor) -> StoragePlace | None:
        """By offset and strides."""
        if type(x) not in _PLAIN or x.is_meta or x.size == 0:
            return None
        storage = x.untyped_storage()
        if storage.size() == 0:
            return None
        strides = tuple(x.stride())
        last = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
        return StoragePlace(
            storage.data_ptr(), x.storage_offset() * x.itemsize, (last + 1) * x.itemsize, strides
        )

    def storage_bytes(self, x: mindspore.Tensor, start: int, nbytes: int) -> mindspore.Tensor:
        """Bytes of a storage, which knows a dtype here."""
        made = mint.empty((0,), dtype=x.dtype)
        row = made.set_(x.untyped_storage(), start // x.itemsize, (nbytes // x.itemsize,), (1,))
        return row.view(mindspore.uint8)

    def over_bytes(
        self,
        memory: mindspore.Tensor,
        start: int,
        dtype: Any,
        shape: Sequence[int],
        strides: Sequence[int],
    ) -> mindspore.Tensor:
        """Over the same storage, seen as one of another dtype."""
        row = memory.view(dtype)
        made = mint.empty((0,), dtype=dtype)
        offset = row.storage_offset() + start // row.itemsize
        return made.set_(row.untyped_storage(), offset, tuple(shape), tuple(strides))

    def num_over_storage(self, x: mindspore.Tensor) -> int | None:
        """MindSpore does not tell."""
        return None

    def set_data_(self, x: mindspore.Tensor, data: mindspore.Tensor) -> None:
        """The same object over other memory."""
        _private.update_data(x, ops.stop_gradient(data))
