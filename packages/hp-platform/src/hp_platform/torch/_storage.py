"""Where tensors of PyTorch lie in their storages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hp_platform.protocols.storage import StoragePlace

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class TorchStorageOps:
    """Implements :class:`hp_platform.protocols.StorageOps`."""

    def storage_place(self, x: torch.Tensor) -> StoragePlace | None:
        """By offset and strides."""
        if type(x) not in _PLAIN or x.layout != torch.strided or x.is_meta or x.numel() == 0:
            return None
        if x.is_conj() or x.is_neg() or x.is_quantized:
            return None
        storage = x.untyped_storage()
        if storage.nbytes() == 0:
            return None
        strides = x.stride()
        last = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
        return StoragePlace(
            storage.data_ptr(), x.storage_offset() * x.itemsize, (last + 1) * x.itemsize, strides
        )

    def storage_bytes(self, x: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
        """Bytes of a storage."""
        with torch.no_grad():
            made = torch.empty(0, dtype=torch.uint8, device=x.device)
            return made.set_(x.untyped_storage(), start, (nbytes,), (1,))

    def over_bytes(
        self,
        memory: torch.Tensor,
        start: int,
        dtype: torch.dtype,
        shape: Sequence[int],
        strides: Sequence[int],
    ) -> torch.Tensor:
        """Over the same storage."""
        offset = (memory.storage_offset() + start) // dtype.itemsize
        with torch.no_grad():
            made = torch.empty(0, dtype=dtype, device=memory.device)
            return made.set_(memory.untyped_storage(), offset, tuple(shape), tuple(strides))

    def num_over_storage(self, x: torch.Tensor) -> int | None:
        """By the count of the storage's holders."""
        storage = x.untyped_storage()
        # The storage object that Python holds here counts, too.
        return int(torch._C._storage_Use_Count(storage._cdata)) - 1
