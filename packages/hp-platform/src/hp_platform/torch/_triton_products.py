"""Products of batches of 16-bit matrices on Hopper GPUs, by Triton: those whose result is symmetric at half the operations, and sums
without the copy of what is added. Imported where Triton is installed and used first. For bits see [Note: tiles and bits].

Five matrices of 8192 x 2048 on NVIDIA H200: ``x^T x`` in 0.25 ms (library 0.42), the square and
what is added 0.09 (0.16), the product and what is added 0.50 (0.61).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from hp_platform.torch._triton_product_kernel import product_kernel


class Tiling(NamedTuple):
    """How a product is divided into programs."""

    rows: int
    cols: int
    depth: int
    """Of the factors, that are read at a time."""
    parts: int
    """In which a tile is stored: a part at a time takes room in shared memory."""
    warps: int
    stages: int
    """Of the pipeline of reads."""
    programs: int | None = None
    """As many as this do one tile after the other; None: one for each tile."""


_WIDE = Tiling(128, 256, 64, 2, 8, 3)
_SQUARE = Tiling(128, 128, 64, 1, 4, 3)
_OF_SQUARES = 1.2  # their time for as many operations, relative to that of the wide ones
_GROUP = 8  # rows of tiles that are gone through together, so that what they share is read from the cache
_MULTIPLE = 8  # of elements, 16 bytes: where rows begin that the accelerator reads
_MOST = 2**31 - 1
_NARROW = frozenset({torch.bfloat16, torch.float16})
_HOPPER = 90  # where the tilings are measured


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

    def transposed(self) -> _Lying:
        return self._replace(is_turned=not self.is_turned)

    def tiled(self, rows: int, cols: int) -> TensorDescriptor:
        """Read and written in tiles; of these numbers of rows and columns of the matrices that are meant."""
        found: TensorDescriptor = TensorDescriptor.__new__(
            TensorDescriptor
        )  # its checks take longer than a launch
        found.base, found.shape, found.strides = self.tensor, list(self.shape), list(self.strides)
        found.block_shape, found.padding = [1, cols, rows] if self.is_turned else [1, rows, cols], "zero"
        return found


class TritonProducts:
    """Launches by what a compiled kernel depends on: looking for it again costs the host more than the launch."""

    def __init__(self) -> None:
        self._compiled: dict[Any, Any] = {}
        self._processors: dict[int, int] = {}
        """Of each device that the kernels are for; 0 for others."""

    def gram(self, x: torch.Tensor, tiling: Tiling | None = None) -> torch.Tensor | None:
        """``x x^T`` of ``x (b, m, n)``; None for what the kernel does not know."""
        lying = _lying(x)
        if lying is None or lying.rows % _MULTIPLE or not self._processors_of(x.device):
            return None
        return self._product(lying, lying.transposed(), None, 1.0, 0.0, tiling, is_symmetric=True)

    def square_add(
        self, x: torch.Tensor, alpha: float, beta: float, tiling: Tiling | None = None
    ) -> torch.Tensor | None:
        """``alpha x x + beta x`` of symmetric matrices; None for what the kernel does not know."""
        lying = _lying(x)
        if lying is None or lying.is_turned or not self._processors_of(x.device):
            return None
        return self._product(lying, lying.transposed(), lying, alpha, beta, tiling, is_symmetric=True)

    def matmul_add(
        self,
        addend: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        alpha: float,
        beta: float,
        tiling: Tiling | None = None,
    ) -> torch.Tensor | None:
        """``alpha x y + beta addend``; None for what the kernel does not know."""
        left, right, added = _lying(x), _lying(y), _lying(addend)
        if left is None or right is None or added is None or added.is_turned:
            return None
        if not x.dtype == y.dtype == addend.dtype or not self._processors_of(x.device):
            return None
        return self._product(left, right, added, alpha, beta, tiling, is_symmetric=False)

    def _processors_of(self, device: torch.device) -> int:
        found = self._processors.get(device.index)
        if found is None:
            with torch.accelerator.device_index(device.index):
                target = triton.runtime.driver.active.get_current_target()
            properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
            is_known = target.backend == "cuda" and target.arch == _HOPPER
            found = self._processors[device.index] = properties["multiprocessor_count"] if is_known else 0
        return found

    def _product(
        self,
        x: _Lying,
        y: _Lying,
        addend: _Lying | None,
        alpha: float,
        beta: float,
        tiling: Tiling | None,
        *,
        is_symmetric: bool,
    ) -> torch.Tensor:
        count, rows, cols, device = x.shape[0], x.rows, y.cols, x.tensor.device
        result = torch.empty((count, rows, cols), dtype=x.tensor.dtype, device=device)
        out = _Lying(result, (count, rows, cols), (rows * cols, cols, 1), False)
        tiling = tiling or _tiling(count, rows, cols, self._processors_of(device), is_symmetric)
        tiles = num_tiles(count, rows, cols, tiling, is_symmetric)
        part = tiling.cols // tiling.parts
        arguments = (
            x.tiled(tiling.rows, tiling.depth),
            y.tiled(tiling.depth, tiling.cols),
            (addend or out).tiled(tiling.rows, part),
            out.tiled(tiling.rows, part),
            out.tiled(part, tiling.rows),
            *(count, rows, cols, x.cols, tiles, float(alpha), float(beta)),
            *(*tiling[:4], _GROUP, is_symmetric, x.is_turned, y.is_turned, addend is not None),
            tiling.programs is not None,
        )
        grid = (tiles if tiling.programs is None else min(tiles, tiling.programs), 1, 1)
        key = (device.index, result.dtype, tiling, *arguments[-5:])
        if device.index is None or device.index == torch.accelerator.current_device_index():
            self._launch(key, grid, arguments, tiling)
        else:
            with torch.accelerator.device_index(device.index):
                self._launch(key, grid, arguments, tiling)
        return result

    def _launch(self, key: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], tiling: Tiling) -> None:
        found = self._compiled.get(key)
        if found is None:
            self._compiled[key] = product_kernel[grid](
                *arguments, num_warps=tiling.warps, num_stages=tiling.stages
            )
        else:
            found[grid](*arguments)


def num_tiles(count: int, rows: int, cols: int, tiling: Tiling, is_symmetric: bool) -> int:
    """Of all matrices."""
    if is_symmetric:
        side = max(tiling.rows, tiling.cols)
        blocks = -(-rows // side)
        return count * (blocks * (blocks + 1) // 2) * (side // tiling.rows) * (side // tiling.cols)
    return count * -(-rows // tiling.rows) * -(-cols // tiling.cols)


def _tiling(count: int, rows: int, cols: int, processors: int, is_symmetric: bool) -> Tiling:
    """The one whose last round leaves the fewest processors idle; measured on H200.

    Programs that do one tile after the other keep their processors until the end, so that of a long product, which runs beside
    collectives, they would come to an end late.
    """
    if not is_symmetric:
        return _SQUARE
    wide = 2 * -(-num_tiles(count, rows, cols, _WIDE, is_symmetric) // processors)
    square = _OF_SQUARES * -(-num_tiles(count, rows, cols, _SQUARE, is_symmetric) // processors)
    return _SQUARE if square < wide else _WIDE._replace(programs=processors)


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
