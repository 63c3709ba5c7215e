"""Products of batches of 16-bit matrices on Hopper GPUs, by Triton: those whose result is symmetric at half the operations, and sums
without the copy of what is added. Imported where Triton is installed and used first. For bits see [Note: tiles and bits].

Five matrices of 8192 x 2048 on NVIDIA H200: ``x^T x`` in 0.27 ms (library 0.42), the square and what is added 0.09 (0.16), the product
and what is added 0.50 (0.61).

[Note: launches] A launch costs the host more than a small product takes the GPU: descriptions of where operands lie are made in
Python, one call of the driver each. They depend on addresses and shapes alone, and the allocator gives a loop the same memory in
every turn. So what a launch passes to the driver is kept by these, and passed again.

[Note: small matrices] Even so a launch takes the host 60 to 110 us, the library's 25 (a virtual Intel Xeon), and of matrices of 1024 rows it
saves the GPU no more than 25. So small ones are left to the library, by the size of one matrix, never by how many there are.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from hp_platform.torch._triton_product_kernel import product_kernel

_SIDE, _DEPTH, _GROUP = 128, 64, 8
_OPTIONS = {"num_warps": 4, "num_stages": 3}
_MULTIPLE = 8  # of elements, 16 bytes: where rows begin that the accelerator reads
_MOST = 2**31 - 1
_MOST_KEPT = 4096
_NARROW = frozenset({torch.bfloat16, torch.float16})
_HOPPER = 90  # where the tiles are measured
_SMALLEST = 1536  # see [Note: small matrices]


class _Lying(NamedTuple):
    """A batch of matrices as it lies in memory, with the last dim one after the other."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_turned: bool
    """Whether the matrices that are meant are the transposed ones."""

    @property
    def rows(self) -> int:
        return self.shape[2 if self.is_turned else 1]

    @property
    def cols(self) -> int:
        return self.shape[1 if self.is_turned else 2]

    @property
    def place(self) -> tuple[Any, ...]:
        """What a launch depends on."""
        return self.tensor.data_ptr(), self.shape, self.strides, self.is_turned

    def tiled(self, rows: int, cols: int) -> TensorDescriptor:
        """Read and written in tiles of these numbers of rows and columns of the matrices that are meant."""
        # Without its checks, which take longer than a launch.
        found: TensorDescriptor = TensorDescriptor.__new__(TensorDescriptor)
        found.base, found.shape, found.strides = self.tensor, list(self.shape), list(self.strides)
        found.block_shape, found.padding = [1, cols, rows] if self.is_turned else [1, rows, cols], "zero"
        return found


_Operands: TypeAlias = tuple[_Lying, _Lying | None, _Lying | None, _Lying]
"""Two factors (of one: itself, transposed), what is added, and the result."""


class TritonProducts:
    """See [Note: launches]. ``smallest``: rows of the symmetric matrix, at least; see [Note: small matrices]."""

    def __init__(self, smallest: int = _SMALLEST) -> None:
        self._smallest = smallest
        self._is_for: dict[torch.device, bool] = {}
        self._compiled: dict[Any, Any] = {}
        self._kept: dict[Any, Callable[[int], None]] = {}

    def gram(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """``x x^T`` of ``x (b, m, n)``, in ``out`` or new memory, here and below; None for what the kernel does not know."""
        lying = _lying(x)
        if lying is None or lying.rows % _MULTIPLE or not self._knows(x.device, lying.rows):
            return None
        return self._product(lying, None, None, 1.0, 0.0, out)

    def square_add(
        self, x: torch.Tensor, alpha: float, beta: float, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """``alpha x x + beta x`` of symmetric matrices; None for what the kernel does not know."""
        lying = _lying(x)
        if (
            lying is None
            or lying.is_turned
            or lying.rows != lying.cols
            or not self._knows(x.device, lying.rows)
        ):
            return None
        return self._product(lying, None, lying, alpha, beta, out)

    def matmul_add(
        self,
        addend: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        alpha: float,
        beta: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """``alpha x y + beta addend``; None for what the kernel does not know."""
        left, right, added = _lying(x), _lying(y), _lying(addend)
        if left is None or right is None or added is None or added.is_turned:
            return None
        # What does not match is for the framework to refuse, or to repeat: the accelerator would read zeros behind the end.
        fitting = (left.shape[0], left.rows, right.cols)
        if left.cols != right.rows or right.shape[0] != fitting[0] or added.shape != fitting:
            return None
        if not x.dtype == y.dtype == addend.dtype or not self._knows(x.device, left.cols):
            return None
        return self._product(left, right, added, alpha, beta, out)

    def _knows(self, device: torch.device, rows: int) -> bool:
        if rows < self._smallest:
            return False
        found = self._is_for.get(device)
        if found is None:
            with torch.accelerator.device_index(device.index):
                target = triton.runtime.driver.active.get_current_target()
            found = self._is_for[device] = target.backend == "cuda" and target.arch == _HOPPER
        return found

    def _product(
        self,
        x: _Lying,
        y: _Lying | None,
        addend: _Lying | None,
        alpha: float,
        beta: float,
        out: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Without ``y`` of ``x`` and itself, transposed: a symmetric result."""
        count, rows, cols = x.shape[0], x.rows, x.rows if y is None else y.cols
        result = x.tensor.new_empty((count, rows, cols)) if out is None else out
        if out is not None and not _is_result(out, (count, rows, cols), x.tensor):
            return None
        operands = (x, y, addend, _Lying(result, (count, rows, cols), (rows * cols, cols, 1), False))
        device = result.device
        key = (device, result.dtype, alpha, beta, *(each and each.place for each in operands))
        if device.index is None or device.index == torch.accelerator.current_device_index():
            self._launch(key, operands, alpha, beta)
        else:
            with torch.accelerator.device_index(device.index):
                self._launch(key, operands, alpha, beta)
        return result

    def _launch(self, key: Any, operands: _Operands, alpha: float, beta: float) -> None:
        x, y, addend, out = operands
        again = self._kept.get(key)
        if again is None:
            arguments = (
                x.tiled(_SIDE, _DEPTH),
                y and y.tiled(_DEPTH, _SIDE),
                addend and addend.tiled(_SIDE, _SIDE),
                out.tiled(_SIDE, _SIDE),
                *(out.rows, out.cols, x.cols, float(alpha), float(beta)),
                *(_SIDE, _DEPTH, _GROUP, y is None, x.is_turned, y is not None and y.is_turned),
                addend is not None,
            )
            grid = (num_tiles(out.shape[0], out.rows, out.cols, is_symmetric=y is None), 1, 1)
            kind = (out.tensor.device, out.tensor.dtype, *arguments[-4:])
            compiled = self._compiled.get(kind)
            if compiled is None:
                self._compiled[kind] = product_kernel[grid](*arguments, **_OPTIONS)
                return
            again = _prepared(compiled, grid, arguments)
            if again is None:
                compiled[grid](*arguments)
                return
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = again
        again(triton.runtime.driver.active.get_current_stream(out.tensor.device.index))


def _prepared(
    compiled: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...]
) -> Callable[[int], None] | None:
    """A launch on a stream with everything worked out; None in versions of Triton whose launcher has not been looked at.

    In 3.6 a launcher is a function in C behind one in Python, which describes operands anew at every launch.
    """
    if not triton.__version__.startswith("3.6."):
        return None
    described = importlib.import_module("triton.backends.nvidia.driver").make_tensordesc_arg
    launcher = compiled.run
    behind = inspect.getclosurevars(launcher.launch).nonlocals
    in_c, places, about = behind["launcher"], behind["tensordesc_indices"], iter(behind["tensordesc_meta"])
    operands: list[Any] = []
    for place, argument in enumerate(arguments):
        operands.extend(described(argument, next(about)) if place in places else [argument])
    options = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    scratch, hooks = (None, None), (None, None, None)  # the kernel needs none
    rest = (compiled.function, *options, *scratch, compiled.packed_metadata, *hooks, *operands)
    return lambda stream: in_c(*grid, stream, *rest)


def num_tiles(count: int, rows: int, cols: int, *, is_symmetric: bool) -> int:
    """Of all matrices."""
    down = -(-rows // _SIDE)
    return count * (down * (down + 1) // 2 if is_symmetric else down * -(-cols // _SIDE))


def _is_result(out: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> bool:
    """Whether the accelerator writes there what it would write to new memory; the framework says what is wrong with it, or copies."""
    return out.shape == shape and out.dtype == like.dtype and out.is_contiguous() and out.data_ptr() % 16 == 0


def _lying(x: torch.Tensor) -> _Lying | None:
    """None for what the accelerator does not read: other than batches of 16-bit matrices whose rows or columns begin at multiples of 16
    bytes.
    """
    if x.dim() != 3 or x.dtype not in _NARROW or not 0 < x.numel() < _MOST or x.data_ptr() % 16:
        return None
    (count, rows, cols), (batch, row, col) = x.shape, x.stride()
    is_turned = col != 1
    if (is_turned and row != 1) or batch % _MULTIPLE or batch <= 0:
        return None
    if is_turned:
        rows, cols, row = cols, rows, col
    if row % _MULTIPLE or row <= 0 or cols % _MULTIPLE:
        return None
    return _Lying(x, (count, rows, cols), (batch, row, 1), is_turned)
