"""Tensors: dtypes, creation, movement, views, storage, safe in-place writes, many tensors at once.

Arithmetic that makes new tensors needs no primitive: ``x + y``, ``x * 2``, ``x @ w``, ``x[...]`` (reading) mean the same
on both frameworks. Writing does not: MindSpore on CPU ignores in-place arithmetic silently, so shared code writes only
through the functions below whose names end in an underscore.

Two more things that operators do otherwise on MindSpore:

* A Python float in arithmetic is rounded to float32, also beside a float64 tensor: ``x * 0.1`` multiplies by 0.10000000149.
  A constant that must be exact is a tensor, ``x * platform.full((), 0.1, "float64")``. Integers are exact.
* Operands without elements. Functions of the platform give what numpy gives (a sum over nothing is 0, a mean of nothing NaN),
  and zeros flow back to every operand. Of operators this holds only for arithmetic with a number or a tensor of the same
  shape. So where an operand may be empty, write ``platform.matmul(x, y)`` for ``x @ y`` (which returns stale memory when it
  contracts nothing) and :meth:`TensorOps.narrow` for a slice ``x[a:b]`` (whose backward raises), and stretch no operand
  that has a gradient over an empty one (its gradient may be stale memory).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

Tensor: TypeAlias = Any
"""The framework's tensor. Shared code treats it as opaque but for operators, ``shape``, ``ndim`` and ``dtype``."""
AnyTensor: TypeAlias = Tensor
"""The same, for annotations inside of the Protocol, where ``Tensor`` is the framework's class."""
DType: TypeAlias = Any
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
    def tensor(self, data: Any, dtype: DType | None = None, device: str | None = None) -> AnyTensor:
        """A new tensor that owns a copy of ``data`` (numbers, nested lists, numpy array)."""
        ...

    def empty(self, shape: Sequence[int], dtype: DType | None = None, device: str | None = None) -> AnyTensor:
        """Uninitialised memory; on ``"meta"`` no memory at all. The default dtype is float32."""
        ...

    def full(
        self, shape: Sequence[int], value: Any, dtype: DType | None = None, device: str | None = None
    ) -> AnyTensor:
        """A tensor filled with ``value`` (also 0-d: ``shape=()``)."""
        ...

    def zeros(self, shape: Sequence[int], dtype: DType | None = None, device: str | None = None) -> AnyTensor:
        """``full(shape, 0)``."""
        ...

    def arange(
        self, start: int, stop: int, dtype: DType | None = None, device: str | None = None
    ) -> AnyTensor:
        """``start, start + 1, ... stop - 1``; the default dtype is int64."""
        ...

    def zeros_like(self, x: AnyTensor) -> AnyTensor:
        """Zeros with the shape, dtype and device of ``x``."""
        ...

    def clone(self, x: AnyTensor) -> AnyTensor:
        """A differentiable copy in its own, contiguous storage."""
        ...

    # --- movement
    def cast(self, x: AnyTensor, dtype: DType) -> AnyTensor:
        """Differentiable conversion; returns ``x`` itself if the dtype is already right."""
        ...

    def to_device(self, x: AnyTensor, device: str, non_blocking: bool = False) -> AnyTensor:
        """``x`` on ``device``; ``x`` itself if it is there."""
        ...

    def device_of(self, x: AnyTensor) -> str:
        """``"cpu"``, ``"cuda:0"``, ``"npu:1"`` or ``"meta"``."""
        ...

    def to_numpy(self, x: AnyTensor) -> Any:
        """A numpy copy on the host (bfloat16 comes as float32, exactly). Waits for the device."""
        ...

    def to_bits(self, x: AnyTensor) -> Any:
        """A numpy copy on the host of the very bits, as unsigned integers as wide as an element. Waits for the device.

        For every dtype of at most 8 bytes, also those that numpy lacks; ValueError for complex128.
        """
        ...

    def from_bits(self, bits: Any, dtype: DType, device: str | None = None) -> AnyTensor:
        """The tensor whose :meth:`to_bits` is ``bits``. It may stand on the array's memory, so nobody may write there any more."""
        ...

    def is_tensor(self, x: Any) -> bool:
        """Whether ``x`` is a tensor of this framework (parameters and subclasses too)."""
        ...

    # --- shape. Views where the framework can, so never write into a result: copy_ into the base instead.
    def reshape(self, x: AnyTensor, shape: Sequence[int]) -> AnyTensor:
        """Same elements in row-major order."""
        ...

    def transpose(self, x: AnyTensor, dim0: int, dim1: int) -> AnyTensor:
        """Two dims swapped."""
        ...

    def narrow(self, x: AnyTensor, dim: int, start: int, length: int) -> AnyTensor:
        """``x[start : start + length]`` along ``dim``; ``length`` may be 0."""
        ...

    def split(self, x: AnyTensor, sizes: Sequence[int], dim: int = 0) -> list[AnyTensor]:
        """Pieces of the given sizes along ``dim`` (sizes may be 0)."""
        ...

    def cat(self, xs: Sequence[AnyTensor], dim: int = 0) -> AnyTensor:
        """Differentiable concatenation; pieces may be empty along ``dim``."""
        ...

    def contiguous(self, x: AnyTensor) -> AnyTensor:
        """Row-major and whole; ``x`` itself if it already is."""
        ...

    def is_contiguous(self, x: AnyTensor) -> bool:
        """Whether elements lie in row-major order without gaps."""
        ...

    def where(self, condition: AnyTensor, x: AnyTensor, y: AnyTensor) -> AnyTensor:
        """Elementwise choice."""
        ...

    # --- along one dim
    def amax(self, x: AnyTensor, dim: int, keepdim: bool = False) -> AnyTensor:
        """The largest elements along ``dim``, which has some. NaN wins. No gradient is recorded."""
        ...

    def take_along(self, x: AnyTensor, dim: int, index: AnyTensor) -> AnyTensor:
        """``x`` at the integers ``index`` along ``dim``; ``index`` has as many dims as ``x``, and its sizes but for ``dim``."""
        ...

    # --- storage
    def storage_nbytes(self, x: AnyTensor) -> int:
        """Bytes of the whole storage below ``x``."""
        ...

    def resize_storage_(self, x: AnyTensor, nbytes: int) -> None:
        """Free (``nbytes=0``) or get back the memory below ``x``; the tensor object and all its views stay, contents are lost."""
        ...

    def data_ptr(self, x: AnyTensor) -> int:
        """Address of the first element; tells whether two tensors alias."""
        ...

    def alias(self, x: AnyTensor) -> AnyTensor:
        """A tensor over the memory of the contiguous ``x`` (which may be a part of a larger tensor), outside of the graph, with a
        storage of its own that is just as large as ``x``, and a version count of its own. It keeps the memory alive.

        NotImplementedError unless ``supports("alias")``; ValueError if ``x`` is not contiguous.
        """
        ...

    def storage_views(
        self, shapes: Sequence[Sequence[int]], dtype: DType | None = None, device: str | None = None
    ) -> tuple[AnyTensor, list[AnyTensor]]:
        """``(base, views)``: uninitialised contiguous tensors of ``shapes``, one after the other without gaps in one storage;
        ``base`` is 1-D and has all their elements.

        A view shows the memory that is below ``base`` at the time, also after :meth:`resize_storage_` of ``base`` has freed it and
        got it back, at another address perhaps. Each is a leaf with a version count of its own: a write to one of them, or to
        ``base``, does not count for the others. NotImplementedError unless ``supports("storage_views")``.
        """
        ...

    def stand_in(
        self,
        shape: Sequence[int],
        dtype: DType,
        device: str,
        get: Callable[[], AnyTensor],
        linear: Callable[[AnyTensor, AnyTensor | None], AnyTensor] | None = None,
    ) -> AnyTensor:
        """A tensor without memory that knows its shape, dtype and device; any function called on it is called on ``get()``.

        ``linear(x, bias)``, if given, is called instead of the framework's ``linear`` with it as the weight.

        NotImplementedError unless ``supports("stand_ins")``.
        """
        ...

    def set_data_(self, x: AnyTensor, data: AnyTensor) -> None:
        """Let the tensor or parameter object ``x`` stand for ``data`` from now on: same object, other memory, shape and dtype allowed to differ."""
        ...

    # --- safe in-place writes (no gradient is recorded; x may require grad). The target really changes on every backend.
    def copy_(self, x: AnyTensor, value: AnyTensor, non_blocking: bool = False) -> AnyTensor:
        """Write ``value`` (broadcast, cast, from any device) into ``x``; ``x`` may be a view where ``supports("write_into_view")``.
        Returns ``x``.

        ``non_blocking``: between a device and pinned host memory (:meth:`~hp_platform.protocols.DeviceHandle.empty_pinned`) the
        host does not wait: the copy is in the order of the current stream, and the host reads or reuses the memory after an
        event recorded behind it. No effect where the framework or device has no such copies.
        """
        ...

    def add_(self, x: AnyTensor, y: Any, alpha: float = 1.0) -> AnyTensor:
        """``x = x + alpha * y`` in place."""
        ...

    def mul_(self, x: AnyTensor, y: Any) -> AnyTensor:
        """``x = x * y`` in place."""
        ...

    def add_along_(self, x: AnyTensor, dim: int, index: AnyTensor, values: AnyTensor) -> AnyTensor:
        """Add ``values`` at the integers ``index`` along ``dim``: one for each line, so both have size 1 there. Returns ``x``."""
        ...

    def fill_(self, x: AnyTensor, value: float) -> AnyTensor:
        """Every element becomes ``value``."""
        ...

    # --- many tensors in one launch where the framework can
    def foreach_copy_(
        self, xs: Sequence[AnyTensor], values: Sequence[AnyTensor], non_blocking: bool = False
    ) -> None:
        """``copy_`` of pairs."""
        ...

    def foreach_copy_both_(
        self, xs: Sequence[AnyTensor], ys: Sequence[AnyTensor], values: Sequence[AnyTensor]
    ) -> None:
        """``copy_`` of each value to two places, which do not overlap. On cuda one pass over memory for each value that lies without gaps, as
        its places do.
        """
        ...

    def foreach_cast(self, xs: Sequence[AnyTensor], dtype: DType) -> list[AnyTensor]:
        """``cast`` of each."""
        ...

    def foreach_split(
        self, xs: Sequence[AnyTensor], sizes: Sequence[Sequence[int]], dim: int = 0
    ) -> list[list[AnyTensor]]:
        """``split`` of each by its own sizes."""
        ...

    def foreach_add_(self, xs: Sequence[AnyTensor], ys: Sequence[AnyTensor], alpha: float = 1.0) -> None:
        """``add_`` of pairs."""
        ...

    def foreach_mul_(self, xs: Sequence[AnyTensor], factor: float | AnyTensor) -> None:
        """``mul_`` of each by one number, which may be a 0-d tensor on their device: then the host does not wait for it.

        Beside a tensor the ``xs`` are of one dtype. To 16-bit floats the factor is not rounded before: each product is rounded once.
        """
        ...

    def foreach_norm(self, xs: Sequence[AnyTensor], p: float, dtype: DType) -> AnyTensor:
        """The p-norm of each, all of its elements taken as one vector: a tensor ``(len(xs),)``, computed in ``dtype``; not recorded.

        ``xs``: at least one; of one floating dtype, on one device, where the result lies. ``p``: any number but NaN: 0 counts
        the elements that are not 0, ``inf`` and ``-inf`` give the largest and the smallest magnitude, NaN wins. A norm over no
        elements is 0, for negative ``p`` ``inf``: what changes nothing beside others. One launch for many tensors where the framework
        has it (torch on cuda for ``p`` of 1, 2 and ``inf``), else one for each. The host does not wait.
        """
        ...

    def reduce_rows_(
        self, x: AnyTensor, rows: AnyTensor, op: str, own: AnyTensor | None = None, at: int = 0
    ) -> AnyTensor:
        """``x`` ``(n,)`` becomes the ``"sum"`` or ``"mean"`` of ``rows`` ``(r, n)`` along dim 0, computed in the dtype of ``x``.

        ``own`` ``(n,)`` stands for ``rows[at]``, which is not read then, and may be overwritten.
        """
        ...
