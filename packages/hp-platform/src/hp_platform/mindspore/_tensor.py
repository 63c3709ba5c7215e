"""Tensors of MindSpore."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mindspore
import numpy as np
from mindspore import mint, ops

from hp_platform.bits import unsigned
from hp_platform.mindspore import _composed, _private
from hp_platform.mindspore._dtypes import FLOATING, ITEMSIZE, NAME_OF, resolve
from hp_platform.mindspore._private import executor
from hp_platform.mindspore._recording import no_grad
from hp_platform.mindspore._storage import MindSporeStorageOps
from hp_platform.mindspore._write import exact_number, write
from hp_platform.mindspore.device import framework_device, platform_device


def _at(x: mindspore.Tensor) -> AbstractContextManager[Any]:
    """Where operations on ``x`` are dispatched: MindSpore sends them to the process' device, also those on meta tensors."""
    return mindspore.DeviceCtx("meta") if x.is_meta else nullcontext()


def _base(x: mindspore.Tensor) -> mindspore.Tensor:
    """``x`` for making a view. A view made under ``no_grad`` would claim to be a leaf that requires a gradient."""
    return ops.stop_gradient(x) if _private.requires_grad(x) and not executor.enable_grad() else x


class MindSporeTensorOps(MindSporeStorageOps):
    """Implements :class:`hp_platform.protocols.TensorOps`."""

    Tensor = mindspore.Tensor

    # --- dtypes
    dtype = staticmethod(resolve)

    def dtype_name(self, dtype: Any) -> str:
        """Name of a dtype."""
        return NAME_OF[resolve(dtype)]

    def itemsize(self, dtype: Any) -> int:
        """Bytes of an element."""
        return ITEMSIZE[self.dtype_name(dtype)]

    def is_floating(self, dtype: Any) -> bool:
        """Whether it is a floating-point dtype."""
        return self.dtype_name(dtype) in FLOATING

    # --- creation
    def tensor(self, data: Any, dtype: Any = None, device: str | None = None) -> mindspore.Tensor:
        """A new tensor with a copy of ``data``."""
        if isinstance(data, mindspore.Tensor):
            made = _private.own_copy(ops.stop_gradient(data))
            return self._placed(made if dtype is None else made.astype(resolve(dtype)), device)
        array = np.array(data, order="C")
        if not isinstance(data, (np.ndarray, np.generic)) and array.dtype == np.float64:
            # Python's numbers become float32 unless asked otherwise, numpy's keep their dtype.
            array = array if dtype is not None else array.astype(np.float32)
        made = mindspore.Tensor(array)
        return self._placed(made if dtype is None else made.astype(resolve(dtype)), device)

    def empty(self, shape: Sequence[int], dtype: Any = None, device: str | None = None) -> mindspore.Tensor:
        """Uninitialised memory."""
        return mint.empty(
            tuple(shape),
            dtype=mindspore.float32 if dtype is None else resolve(dtype),
            device=None if device is None else framework_device(device),
        )

    def full(
        self, shape: Sequence[int], value: Any, dtype: Any = None, device: str | None = None
    ) -> mindspore.Tensor:
        """Filled with one value."""
        made = self.empty(shape, dtype, device)
        write(made, exact_number(value, made.dtype))
        return made

    def zeros(self, shape: Sequence[int], dtype: Any = None, device: str | None = None) -> mindspore.Tensor:
        """Filled with zeros."""
        if device == "meta":
            return self.empty(shape, dtype, device)
        return self._placed(
            ops.zeros(tuple(shape), mindspore.float32 if dtype is None else resolve(dtype)), device
        )

    def arange(self, start: int, stop: int, dtype: Any = None, device: str | None = None) -> mindspore.Tensor:
        """Consecutive numbers."""
        wanted = mindspore.int64 if dtype is None else resolve(dtype)
        if device == "meta":
            return self.empty((max(0, stop - start),), wanted, device)
        return self._placed(mindspore.Tensor(np.arange(start, stop, dtype=np.int64)).astype(wanted), device)

    def zeros_like(self, x: mindspore.Tensor) -> mindspore.Tensor:
        """Zeros like ``x``."""
        # ops.zeros_like would go by the shape that x had before set_data_.
        return self.full(tuple(x.shape), 0, x.dtype, self.device_of(x))

    def clone(self, x: mindspore.Tensor) -> mindspore.Tensor:
        """A contiguous copy."""
        with _at(x):
            return _private.own_copy(x)

    # --- movement
    def cast(self, x: mindspore.Tensor, dtype: Any) -> mindspore.Tensor:
        """Another dtype."""
        wanted = resolve(dtype)
        if x.dtype == wanted:
            return x
        with _at(x):
            return x.astype(wanted)

    def to_device(self, x: mindspore.Tensor, device: str, non_blocking: bool = False) -> mindspore.Tensor:
        """Another device."""
        return self._placed(x, device, non_blocking=non_blocking)

    def device_of(self, x: mindspore.Tensor) -> str:
        """Device with its index."""
        return platform_device(x.device)

    def to_numpy(self, x: mindspore.Tensor) -> Any:
        """A copy on the host."""
        if x.is_meta:
            raise RuntimeError(
                f"a meta tensor of shape {tuple(x.shape)} has no elements to copy to numpy; give it memory with set_data_"
            )
        x = ops.stop_gradient(x)
        if x.dtype == mindspore.bfloat16:
            x = x.astype(mindspore.float32)
        return np.array(x.asnumpy(), copy=True)

    def to_bits(self, x: mindspore.Tensor) -> Any:
        """The bits on the host."""
        kind = unsigned(self.dtype_name(x.dtype), self.itemsize(x.dtype))
        shape, host = tuple(x.shape), ops.stop_gradient(x)
        if host.dtype == mindspore.bfloat16:
            host = host.contiguous().view((x.size,)).view(mindspore.int16)
        return np.array(host.asnumpy(), order="C").reshape(shape).view(kind)

    def from_bits(self, bits: Any, dtype: Any, device: str | None = None) -> mindspore.Tensor:
        """A tensor of these bits."""
        wanted = resolve(dtype)
        if wanted == mindspore.bfloat16:
            row = mindspore.Tensor(bits.reshape(-1).view(np.int16))
            return self._placed(row.view(wanted).view(bits.shape), device)
        return self._placed(mindspore.Tensor(bits.view(NAME_OF[wanted])), device)

    def is_tensor(self, x: Any) -> bool:
        """Whether it is a MindSpore tensor."""
        return isinstance(x, mindspore.Tensor)

    # --- shape
    def reshape(self, x: mindspore.Tensor, shape: Sequence[int]) -> mindspore.Tensor:
        """Same elements."""
        with _at(x):
            return _base(x).reshape(tuple(shape))

    def transpose(self, x: mindspore.Tensor, dim0: int, dim1: int) -> mindspore.Tensor:
        """Two dims swapped."""
        with _at(x):
            return mint.transpose(_base(x), dim0, dim1)

    def narrow(self, x: mindspore.Tensor, dim: int, start: int, length: int) -> mindspore.Tensor:
        """A range of one dim."""
        with _at(x):
            return mint.narrow(_base(x), dim, start, length)

    def split(self, x: mindspore.Tensor, sizes: Sequence[int], dim: int = 0) -> list[mindspore.Tensor]:
        """Pieces, views of ``x``."""
        with _at(x):
            return list(mint.split(_base(x), list(sizes), dim))

    def cat(self, xs: Sequence[mindspore.Tensor], dim: int = 0) -> mindspore.Tensor:
        """Joined."""
        with _at(xs[0]):
            return mint.cat(list(xs), dim)

    def contiguous(self, x: mindspore.Tensor) -> mindspore.Tensor:
        """Row-major."""
        return x.contiguous()

    def is_contiguous(self, x: mindspore.Tensor) -> bool:
        """Whether it is row-major."""
        return x.is_contiguous()

    where = staticmethod(_composed.where)
    take_along = staticmethod(_composed.take_along)

    def amax(self, x: mindspore.Tensor, dim: int, keepdim: bool = False) -> mindspore.Tensor:
        """Largest along a dim."""
        with no_grad():
            return _composed.amax(x, dim, keepdim)

    # --- storage. More of it in the base class.
    def storage_views(
        self, shapes: Sequence[Sequence[int]], dtype: Any = None, device: str | None = None
    ) -> tuple[mindspore.Tensor, list[mindspore.Tensor]]:
        """Tensors one after the other in one storage."""
        sizes = [math.prod(shape) for shape in shapes]
        base = self.empty((sum(sizes),), dtype, device)
        rows = self.split(base, sizes) if sizes else []
        return base, [
            ops.stop_gradient(self.reshape(row, shape)) for row, shape in zip(rows, shapes, strict=True)
        ]

    # --- safe in-place writes
    def copy_(
        self, x: mindspore.Tensor, value: mindspore.Tensor, non_blocking: bool = False
    ) -> mindspore.Tensor:
        """Write ``value``."""
        write(x, value if x.is_meta else self._placed(value, self.device_of(x), non_blocking=non_blocking))
        return x

    def add_(self, x: mindspore.Tensor, y: Any, alpha: float = 1.0) -> mindspore.Tensor:
        """Add in place."""
        with no_grad(), _at(x):
            term = y if isinstance(y, mindspore.Tensor) else exact_number(y, x.dtype)
            write(x, x + (term if alpha == 1 else term * exact_number(alpha, term.dtype)))
        return x

    def mul_(self, x: mindspore.Tensor, y: Any) -> mindspore.Tensor:
        """Multiply in place."""
        with no_grad(), _at(x):
            write(x, x * (y if isinstance(y, mindspore.Tensor) else exact_number(y, x.dtype)))
        return x

    def add_along_(
        self, x: mindspore.Tensor, dim: int, index: mindspore.Tensor, values: mindspore.Tensor
    ) -> mindspore.Tensor:
        """Add to one element of each line."""
        with no_grad(), _at(x):
            write(x, x + _composed.placed_along(x, dim, index, values))
        return x

    def fill_(self, x: mindspore.Tensor, value: float) -> mindspore.Tensor:
        """Fill in place."""
        write(x, exact_number(value, x.dtype))
        return x

    # --- many tensors: one after the other, MindSpore has no kernels for lists
    def foreach_copy_(
        self,
        xs: Sequence[mindspore.Tensor],
        values: Sequence[mindspore.Tensor],
        non_blocking: bool = False,
    ) -> None:
        """Write pairs."""
        for x, value in _pairs(xs, values):
            self.copy_(x, value, non_blocking)

    def foreach_cast(self, xs: Sequence[mindspore.Tensor], dtype: Any) -> list[mindspore.Tensor]:
        """Cast each."""
        return [self.cast(x, dtype) for x in xs]

    def foreach_split(
        self, xs: Sequence[mindspore.Tensor], sizes: Sequence[Sequence[int]], dim: int = 0
    ) -> list[list[mindspore.Tensor]]:
        """Split each; views."""
        return [self.split(x, own, dim) for x, own in _pairs(xs, sizes)]

    def foreach_add_(
        self, xs: Sequence[mindspore.Tensor], ys: Sequence[mindspore.Tensor], alpha: float = 1.0
    ) -> None:
        """Add pairs in place."""
        for x, y in _pairs(xs, ys):
            self.add_(x, y, alpha)

    foreach_norm = staticmethod(_composed.norms)

    def foreach_mul_(self, xs: Sequence[mindspore.Tensor], factor: Any) -> None:
        """Multiply each in place."""
        for x in xs:
            if isinstance(factor, mindspore.Tensor) and factor.dtype != x.dtype:
                # Rounded once, in the wider dtype; the kernel for both dtypes would round the factor first, or is none.
                wide = max(x.dtype, factor.dtype, key=self.itemsize)
                self.copy_(x, self.cast(self.cast(x, wide) * self.cast(factor, wide), x.dtype))
            else:
                self.mul_(x, factor)

    def _placed(
        self, x: mindspore.Tensor, device: str | None, *, non_blocking: bool = False
    ) -> mindspore.Tensor:
        """``x`` on ``device``, itself if it is there; None: where MindSpore put it."""
        if device is None:
            return x
        here, wanted = self.device_of(x), device
        if ":" not in wanted:
            here = here.partition(":")[0]
        if here == wanted:
            return x
        if x.is_meta:
            raise RuntimeError(
                f"a meta tensor of shape {tuple(x.shape)} has no elements to move to {device!r}; "
                "make memory there with empty and let it stand for that with set_data_"
            )
        return x.to(framework_device(wanted), non_blocking=non_blocking)


def _pairs(xs: Sequence[Any], others: Sequence[Any]) -> list[tuple[Any, Any]]:
    """ValueError if the lists do not pair up."""
    if len(xs) != len(others):
        raise ValueError(f"lists must pair up: got {len(xs)} and {len(others)} entries")
    return list(zip(xs, others, strict=True))
