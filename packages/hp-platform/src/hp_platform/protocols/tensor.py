"""Tensors: dtypes, creation, movement, views, storage, safe in-place writes, many tensors at once.

Arithmetic that makes new tensors needs no primitive: ``x + y``, ``x * 2``, ``x @ w``, ``x[...]`` (reading) mean the same
on both frameworks. Writing does not: MindSpore on CPU ignores in-place arithmetic silently, so shared code writes only
through the functions below whose names end in an underscore.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Tensor = Any
"""The framework's tensor. Shared code treats it as opaque but for operators, ``shape``, ``ndim`` and ``dtype``."""
DType = Any
"""The framework's dtype object; its name is the one that numpy and both frameworks share, such as ``"bfloat16"``."""


class TensorOps(Protocol):
    """Primitives on tensors. ``dtype`` arguments take a name or the framework's object; ``device`` takes ``"cpu"``, ``"cuda:1"``, ``"meta"``."""

    Tensor: type

    # --- dtypes
    def dtype(self, name: str | DType) -> DType:
        """The framework's dtype called ``name`` (``float32``, ``bfloat16``, ``int64``, ``bool`` ...). ValueError for an unknown name."""
        ...

    def dtype_name(self, dtype: DType) -> str:
        """The inverse of :meth:`dtype`."""
        ...

    def itemsize(self, dtype: DType) -> int:
        """Bytes of one element."""
        ...

    def is_floating(self, dtype: DType) -> bool:
        """Whether ``dtype`` is a floating-point one."""
        ...

    # --- creation
    def tensor(self, data: Any, dtype: DType | None = None, device: str | None = None) -> Tensor:
        """A new tensor that owns a copy of ``data`` (numbers, nested lists, numpy array)."""
        ...

    def empty(self, shape: Sequence[int], dtype: DType | None = None, device: str | None = None) -> Tensor:
        """Uninitialised memory; on ``"meta"`` no memory at all. The default dtype is float32."""
        ...

    def full(
        self, shape: Sequence[int], value: Any, dtype: DType | None = None, device: str | None = None
    ) -> Tensor:
        """A tensor filled with ``value`` (also 0-d: ``shape=()``)."""
        ...

    def zeros(self, shape: Sequence[int], dtype: DType | None = None, device: str | None = None) -> Tensor:
        """``full(shape, 0)``."""
        ...

    def arange(self, start: int, stop: int, dtype: DType | None = None, device: str | None = None) -> Tensor:
        """``start, start + 1, ... stop - 1``; the default dtype is int64."""
        ...

    def zeros_like(self, x: Tensor) -> Tensor:
        """Zeros with the shape, dtype and device of ``x``."""
        ...

    def clone(self, x: Tensor) -> Tensor:
        """A differentiable copy in its own, contiguous storage."""
        ...

    # --- movement
    def cast(self, x: Tensor, dtype: DType) -> Tensor:
        """Differentiable conversion; returns ``x`` itself if the dtype is already right."""
        ...

    def to_device(self, x: Tensor, device: str, non_blocking: bool = False) -> Tensor:
        """``x`` on ``device``; ``x`` itself if it is there."""
        ...

    def device_of(self, x: Tensor) -> str:
        """``"cpu"``, ``"cuda:0"``, ``"npu:1"`` or ``"meta"``."""
        ...

    def to_numpy(self, x: Tensor) -> Any:
        """A numpy copy on the host (bfloat16 comes as float32, exactly). Waits for the device."""
        ...

    def is_tensor(self, x: Any) -> bool:
        """Whether ``x`` is a tensor of this framework (parameters and subclasses too)."""
        ...

    # --- shape. Views where the framework can, so never write into a result: copy_ into the base instead.
    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Same elements in row-major order."""
        ...

    def transpose(self, x: Tensor, dim0: int, dim1: int) -> Tensor:
        """Two dims swapped."""
        ...

    def narrow(self, x: Tensor, dim: int, start: int, length: int) -> Tensor:
        """``x[start : start + length]`` along ``dim``; ``length`` may be 0."""
        ...

    def split(self, x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
        """Pieces of the given sizes along ``dim`` (sizes may be 0)."""
        ...

    def cat(self, xs: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Differentiable concatenation; pieces may be empty along ``dim``."""
        ...

    def contiguous(self, x: Tensor) -> Tensor:
        """Row-major and whole; ``x`` itself if it already is."""
        ...

    def is_contiguous(self, x: Tensor) -> bool:
        """Whether elements lie in row-major order without gaps."""
        ...

    def where(self, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Elementwise choice."""
        ...

    # --- storage
    def storage_nbytes(self, x: Tensor) -> int:
        """Bytes of the whole storage below ``x``."""
        ...

    def resize_storage_(self, x: Tensor, nbytes: int) -> None:
        """Free (``nbytes=0``) or get back the memory below ``x``; the tensor object and all its views stay, contents are lost."""
        ...

    def data_ptr(self, x: Tensor) -> int:
        """Address of the first element; tells whether two tensors alias."""
        ...

    def alias(self, x: Tensor) -> Tensor:
        """A tensor over the memory of the contiguous ``x`` (which may be a part of a larger tensor), outside of the graph, with a
        storage of its own that is just as large as ``x``, and a version count of its own. It keeps the memory alive.

        NotImplementedError unless ``supports("alias")``; ValueError if ``x`` is not contiguous."""
        ...

    def set_data_(self, x: Tensor, data: Tensor) -> None:
        """Let the tensor or parameter object ``x`` stand for ``data`` from now on: same object, other memory, shape and dtype allowed to differ."""
        ...

    # --- safe in-place writes (no gradient is recorded; x may require grad). The target really changes on every backend.
    def copy_(self, x: Tensor, value: Tensor) -> Tensor:
        """Write ``value`` (broadcast, cast) into ``x``; ``x`` may be a view where ``supports("write_into_view")``. Returns ``x``."""
        ...

    def add_(self, x: Tensor, y: Any, alpha: float = 1.0) -> Tensor:
        """``x = x + alpha * y`` in place."""
        ...

    def mul_(self, x: Tensor, y: Any) -> Tensor:
        """``x = x * y`` in place."""
        ...

    def fill_(self, x: Tensor, value: float) -> Tensor:
        """Every element becomes ``value``."""
        ...

    # --- many tensors in one launch where the framework can
    def foreach_copy_(self, xs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """``copy_`` of pairs."""
        ...

    def foreach_cast(self, xs: Sequence[Tensor], dtype: DType) -> list[Tensor]:
        """``cast`` of each."""
        ...

    def foreach_split(
        self, xs: Sequence[Tensor], sizes: Sequence[Sequence[int]], dim: int = 0
    ) -> list[list[Tensor]]:
        """``split`` of each by its own sizes."""
        ...

    def foreach_add_(self, xs: Sequence[Tensor], ys: Sequence[Tensor], alpha: float = 1.0) -> None:
        """``add_`` of pairs."""
        ...

    def foreach_mul_(self, xs: Sequence[Tensor], factor: float) -> None:
        """``mul_`` of each by one number."""
        ...
