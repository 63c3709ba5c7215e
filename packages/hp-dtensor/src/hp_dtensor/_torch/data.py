"""What a DTensor holds on PyTorch, as data: moves between dtypes and devices, ``.data``, storage.

The outer tensor shows C++ shape, dtype and device; the marks are nodes over the local tensor's memory. So whatever puts
another memory, dtype or device under a DTensor goes through :meth:`DataMethods._replace`, which keeps all three together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hp_dtensor.base import DTensorBase


class DataMethods(DTensorBase):
    """Storage, dtype and device."""

    if TYPE_CHECKING:
        clone: Any
        contiguous: Any
        item: Any

        def _cast(self, dtype: torch.dtype) -> Any:
            """In another dtype, by the rule of casts; the class has it."""

    @property
    def data(self) -> Any:
        """The same memory outside of the graph, whose writes the graph does not notice."""
        return self._wrap(self._local.data, self._spec)

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, DTensorBase):
            raise ValueError(
                f"the data of a DTensor must be a DTensor, got {type(value).__name__}: use distribute_tensor"
            )
        self._local.data = value._local.detach()
        self._replace(value._spec)

    def set_(self, source: Any) -> Any:
        """Stand for the memory of another DTensor from now on."""
        if not isinstance(source, DTensorBase):
            raise ValueError(
                f"set_ of a DTensor takes a DTensor, got {type(source).__name__}: use distribute_tensor"
            )
        with torch.no_grad():
            self._local.set_(source._local)
        self._replace(source._spec)
        return self

    def _replace(self, spec: Any) -> None:
        self._spec, self._marks = spec, None
        # The outer of a new DTensor has the right face for C++; the Python object stays.
        torch._C._swap_tensor_impl(self, self._wrap(self._local, spec))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """``to(dtype)``, ``to(device)``, ``to(other)`` and their options, as of any tensor of torch.

        What changes nothing returns the tensor itself. A Partial is made whole before a cast that is not linear.
        """
        if len(args) == 1 and not kwargs and type(args[0]) is torch.dtype:
            return self._cast(args[0])
        args = tuple(x._local if isinstance(x, DTensorBase) else x for x in args)
        flags = [x for x in args if isinstance(x, bool)] + [False, False]
        non_blocking, copy = (kwargs.get("non_blocking", flags[0]), kwargs.pop("copy", flags[1]))
        memory_format = kwargs.pop("memory_format", None)
        # torch knows how to read the arguments: what it makes of a tensor without elements has the dtype and the device.
        like = torch.empty(0, dtype=self._local.dtype, device=self._local.device).to(*args, **kwargs)
        x: Any = self._cast(like.dtype)
        if like.device != x._local.device:
            x = self._wrap(x._local.to(like.device, non_blocking=non_blocking), x._spec)
        if memory_format not in (None, torch.preserve_format):
            x = x.contiguous(memory_format=memory_format)
        return x.clone() if copy and x is self else x

    def type(self, dtype: Any = None, non_blocking: bool = False) -> Any:
        """``type(dtype)`` as :meth:`to`, which also takes a name such as ``"torch.FloatTensor"``; without it the local's name."""
        if dtype is None:
            return self._local.type()
        like = torch.empty(0, dtype=self._local.dtype, device=self._local.device).type(dtype)
        return self.to(like.device, like.dtype, non_blocking=non_blocking)

    def cpu(self) -> Any:
        """The pieces on the host."""
        return self.to("cpu")

    def cuda(self, device: Any = None, non_blocking: bool = False) -> Any:
        """The pieces on a cuda device."""
        return self.to("cuda" if device is None else device, non_blocking=non_blocking)

    def is_nonzero(self) -> bool:
        """Whether the one element is not zero, the same on all ranks. Communication: :meth:`item`."""
        return bool(self)

    def __index__(self) -> int:
        value = self.item()
        if not isinstance(value, int):
            raise ValueError(f"a DTensor of {self._local.dtype} is no index: it needs one whole number")
        return int(value)

    def _become(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """This tensor seen otherwise from now on, by the operation ``name`` that makes a view of it."""
        if self._local.requires_grad and self._local.is_leaf:
            raise ValueError(
                f"{name}_ would change a leaf that requires grad: use {name}, or change it before"
            )
        seen = getattr(self, name)(*args, **kwargs)
        if getattr(seen, "_copy_of_view", None):
            raise ValueError(
                f"{name}_ of {self._spec} moves pieces, so that the tensor would leave its memory: use {name}"
            )
        self._local = seen._local
        self._replace(seen._spec)
        return self

    def t_(self) -> Any:
        """A matrix transposed, in its place."""
        return self._become("t")

    def transpose_(self, dim0: int, dim1: int) -> Any:
        """Two dims swapped, in its place; likewise ``swapaxes_`` and ``swapdims_``."""
        return self._become("transpose", dim0, dim1)

    swapaxes_ = swapdims_ = transpose_

    def unsqueeze_(self, dim: int) -> Any:
        """A new dim of size 1, in its place."""
        return self._become("unsqueeze", dim)

    def squeeze_(self, *dim: Any) -> Any:
        """Without dims of size 1, in its place."""
        return self._become("squeeze", *dim)
