"""Tensors of PyTorch. What torch offers under the same signature is bound as it is, so that a call costs no more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from hp_platform.bits import unsigned
from hp_platform.torch import _lists
from hp_platform.torch._dtypes import NAME_OF, WITHOUT_NUMPY, resolve
from hp_platform.torch._stand_in import stand_in
from hp_platform.torch._versions import count_writes, version_before
from hp_platform.torch.device import TorchDevice


class TorchTensorOps:
    """Implements :class:`hp_platform.protocols.TensorOps`."""

    Tensor = torch.Tensor
    _devices: dict[str, TorchDevice]

    # --- dtypes
    dtype = staticmethod(resolve)

    def dtype_name(self, dtype: Any) -> str:
        """Name of a dtype."""
        return NAME_OF[resolve(dtype)]

    def itemsize(self, dtype: Any) -> int:
        """Bytes of an element."""
        return resolve(dtype).itemsize

    def is_floating(self, dtype: Any) -> bool:
        """Whether it is a floating-point dtype."""
        return resolve(dtype).is_floating_point

    # --- creation
    def tensor(self, data: Any, dtype: Any = None, device: str | None = None) -> torch.Tensor:
        """A new tensor with a copy of ``data``."""
        wanted = None if dtype is None else resolve(dtype)
        if isinstance(data, torch.Tensor):
            return data.detach().to(device=device, dtype=wanted, copy=True)
        return torch.tensor(data, dtype=wanted, device=device)

    def empty(self, shape: Sequence[int], dtype: Any = None, device: str | None = None) -> torch.Tensor:
        """Uninitialised memory."""
        return torch.empty(shape, dtype=torch.float32 if dtype is None else resolve(dtype), device=device)

    def full(
        self, shape: Sequence[int], value: Any, dtype: Any = None, device: str | None = None
    ) -> torch.Tensor:
        """Filled with one value."""
        return torch.full(
            shape, value, dtype=torch.float32 if dtype is None else resolve(dtype), device=device
        )

    def zeros(self, shape: Sequence[int], dtype: Any = None, device: str | None = None) -> torch.Tensor:
        """Filled with zeros."""
        return torch.zeros(shape, dtype=torch.float32 if dtype is None else resolve(dtype), device=device)

    def arange(self, start: int, stop: int, dtype: Any = None, device: str | None = None) -> torch.Tensor:
        """Consecutive numbers."""
        return torch.arange(
            start, stop, dtype=torch.int64 if dtype is None else resolve(dtype), device=device
        )

    zeros_like = staticmethod(torch.zeros_like)

    def clone(self, x: torch.Tensor) -> torch.Tensor:
        """A contiguous copy."""
        return x.clone(memory_format=torch.contiguous_format)

    # --- movement
    def cast(self, x: torch.Tensor, dtype: Any) -> torch.Tensor:
        """Another dtype."""
        return x.to(resolve(dtype))

    def to_device(self, x: torch.Tensor, device: str, non_blocking: bool = False) -> torch.Tensor:
        """Another device."""
        return x.to(device, non_blocking=non_blocking)

    def device_of(self, x: torch.Tensor) -> str:
        """Device with its index."""
        return str(x.device)

    def to_numpy(self, x: torch.Tensor) -> Any:
        """A copy on the host."""
        # Copied by torch, not by numpy: a storage that numpy has looked into can never be resized again.
        host = x.detach().to("cpu", torch.float32 if x.dtype in WITHOUT_NUMPY else x.dtype, copy=True)
        return host.resolve_conj().resolve_neg().numpy()

    def to_bits(self, x: torch.Tensor) -> Any:
        """The bits on the host."""
        kind = unsigned(self.dtype_name(x.dtype), x.itemsize)
        host = x.detach().to("cpu", copy=True).resolve_conj().resolve_neg().contiguous()
        if host.dtype in WITHOUT_NUMPY:
            host = host.view(torch.uint16 if host.itemsize == 2 else torch.uint8)
        return host.numpy().view(kind)

    def from_bits(self, bits: Any, dtype: Any, device: str | None = None) -> torch.Tensor:
        """A tensor of these bits."""
        made = torch.from_numpy(bits).view(resolve(dtype))
        return made if device is None else made.to(device)

    def is_tensor(self, x: Any) -> bool:
        """Whether it is a torch tensor."""
        return isinstance(x, torch.Tensor)

    # --- shape
    reshape = staticmethod(torch.reshape)
    transpose = staticmethod(torch.transpose)
    narrow = staticmethod(torch.narrow)
    cat = staticmethod(torch.cat)
    is_contiguous = staticmethod(torch.Tensor.is_contiguous)
    where = staticmethod(torch.where)
    take_along = staticmethod(torch.gather)

    def amax(self, x: torch.Tensor, dim: int, keepdim: bool = False) -> torch.Tensor:
        """Largest along a dim."""
        return x.detach().amax(dim, keepdim)

    def contiguous(self, x: torch.Tensor) -> torch.Tensor:
        """Row-major; a conjugate or negative that is only marked as such is worked out."""
        return x.resolve_conj().resolve_neg().contiguous() if x.is_complex() or x.is_neg() else x.contiguous()

    def split(self, x: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> list[torch.Tensor]:
        """Pieces, views of ``x``."""
        if type(x) is torch.Tensor:  # what torch.split asks of its arguments takes as long as the rest
            return list(torch.split_with_sizes(x, list(sizes), dim))
        return list(torch.split(x, list(sizes), dim))

    # --- storage
    def storage_nbytes(self, x: torch.Tensor) -> int:
        """Bytes of the whole storage."""
        return x.untyped_storage().nbytes()

    def resize_storage_(self, x: torch.Tensor, nbytes: int) -> None:
        """Free or get back the memory."""
        x.untyped_storage().resize_(nbytes)

    data_ptr = staticmethod(torch.Tensor.data_ptr)

    def alias(self, x: torch.Tensor) -> torch.Tensor:
        """The same memory under a storage of its own."""
        if not x.is_contiguous():
            raise ValueError(
                f"alias needs a contiguous tensor, got shape {tuple(x.shape)}, strides {x.stride()}"
            )
        x = x.detach()
        if x.numel() == 0:
            return torch.empty_like(x)
        # DLPack hands over address, shape and an owner to keep alive, and knows no storage: the importer makes a new one.
        # As bytes, because it does not know every dtype.
        return torch.from_dlpack(x.view(-1).view(torch.uint8)).view(x.dtype).view(x.shape)

    def storage_views(
        self, shapes: Sequence[Sequence[int]], dtype: Any = None, device: str | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Tensors one after the other in one storage."""
        sizes = [math.prod(shape) for shape in shapes]
        base = self.empty((sum(sizes),), dtype, device)
        # Views made by slicing would share the version count of base, and so would those that detach() makes of them.
        views = [torch.empty(0, dtype=base.dtype, device=base.device) for _ in shapes]
        starts = accumulate(sizes, initial=0)
        for view, start, shape in zip(views, starts, shapes, strict=False):
            view.set_(base.untyped_storage(), start, tuple(shape))
        return base, views

    stand_in = staticmethod(stand_in)

    def set_data_(self, x: torch.Tensor, data: torch.Tensor) -> None:
        """The same object over other memory."""
        x.data = data

    # --- safe in-place writes. no_grad costs more than a small write: it is entered only where something would be recorded.
    def copy_(self, x: torch.Tensor, value: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Write ``value``."""
        if x.requires_grad or value.requires_grad:
            with torch.no_grad():
                return x.copy_(value, non_blocking)
        return x.copy_(value, non_blocking)

    def add_(self, x: torch.Tensor, y: Any, alpha: float = 1.0) -> torch.Tensor:
        """Add in place."""
        if x.requires_grad or getattr(y, "requires_grad", False):
            with torch.no_grad():
                return x.add_(y, alpha=_number_for(x, alpha))
        return x.add_(y) if alpha == 1 else x.add_(y, alpha=_number_for(x, alpha))

    def mul_(self, x: torch.Tensor, y: Any) -> torch.Tensor:
        """Multiply in place."""
        if x.requires_grad or getattr(y, "requires_grad", False):
            with torch.no_grad():
                return x.mul_(y)
        return x.mul_(y)

    def add_along_(
        self, x: torch.Tensor, dim: int, index: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Add to one element of each line."""
        with torch.no_grad():
            return x.scatter_add_(dim, index, values)

    def fill_(self, x: torch.Tensor, value: float) -> torch.Tensor:
        """Fill in place."""
        if x.requires_grad:
            with torch.no_grad():
                return x.fill_(value)
        return x.fill_(value)

    # --- many tensors. torch refuses empty lists, which are legal here.
    def foreach_copy_(
        self, xs: Sequence[torch.Tensor], values: Sequence[torch.Tensor], non_blocking: bool = False
    ) -> None:
        """Write pairs."""
        if (len(xs) != len(values) or not xs) and not _same_length(xs, values):
            return
        before = version_before(xs)
        if not torch.is_grad_enabled():  # as in the steps of runtimes, whose host is in a hurry
            torch._foreach_copy_(xs, values, non_blocking)
        else:
            with torch.no_grad():
                torch._foreach_copy_(xs, values, non_blocking)
        count_writes(xs, before)

    def foreach_cast(self, xs: Sequence[torch.Tensor], dtype: Any) -> list[torch.Tensor]:
        """Cast each."""
        wanted = resolve(dtype)
        if any(x.requires_grad for x in xs) and torch.is_grad_enabled():
            return [x.to(wanted) for x in xs]
        outs = [x if x.dtype == wanted else torch.empty_like(x, dtype=wanted) for x in xs]
        changed = [(out, x) for out, x in zip(outs, xs, strict=True) if out is not x]
        if changed:
            torch._foreach_copy_([out for out, _ in changed], [x for _, x in changed])
        return outs

    def foreach_split(
        self, xs: Sequence[torch.Tensor], sizes: Sequence[Sequence[int]], dim: int = 0
    ) -> list[list[torch.Tensor]]:
        """Split each; views."""
        _same_length(xs, sizes)
        if all(type(x) is torch.Tensor for x in xs):  # as in :meth:`split`
            split = torch.split_with_sizes
            return [list(split(x, s, dim)) for x, s in zip(xs, sizes, strict=True)]
        return [list(torch.split(x, list(s), dim)) for x, s in zip(xs, sizes, strict=True)]

    def foreach_add_(
        self, xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor], alpha: float = 1.0
    ) -> None:
        """Add pairs in place."""
        if _same_length(xs, ys):
            before = version_before(xs)
            with torch.no_grad():
                torch._foreach_add_(xs, ys, alpha=_number_for(xs[0], alpha))
            count_writes(xs, before)

    def foreach_mul_(self, xs: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
        """Multiply each in place."""
        if not xs:
            return
        before = version_before(xs)
        with torch.no_grad():
            if isinstance(factor, torch.Tensor) and factor.dtype != xs[0].dtype:
                _lists.scale_(xs, factor)
            else:
                torch._foreach_mul_(xs, factor)
        count_writes(xs, before)

    foreach_norm = staticmethod(_lists.norms)


def _number_for(x: torch.Tensor, number: float) -> float | int:
    # torch refuses alpha=1.0 for integer tensors although it is a whole number.
    if x.dtype.is_floating_point or x.dtype.is_complex or not float(number).is_integer():
        return number
    return int(number)


def _same_length(xs: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether there is anything to do. ValueError if the lists do not pair up."""
    if len(xs) != len(others):
        raise ValueError(f"lists must pair up: got {len(xs)} and {len(others)} entries")
    return len(xs) > 0
