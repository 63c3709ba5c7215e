"""Passes over rows on cuda by Triton, each number read once. Imported where Triton is installed and used first.

torch's own reduction along the first dim of few long rows reaches half of the memory's speed, and holds the processors that long
from the products beside it (NVIDIA H200, two rows of 30 million bfloat16: 0.126 ms, this 0.065).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hp_platform.torch._triton_kept import KeptKernel

_BLOCK = 4096
_WARPS = 8
_MOST_ROWS = 64  # they are unrolled
_ADDED = frozenset({torch.float32, torch.bfloat16, torch.float16})


@triton.jit  # type: ignore[untyped-decorator]
def _rows_kernel(  # type: ignore[no-untyped-def]
    rows, own, out, length, stride, scale, ROWS: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < length
    total = tl.load((own if OWN == 0 else rows) + at, mask=exists, other=0.0).to(tl.float32)
    for row in tl.static_range(1, ROWS):
        if row == OWN:
            total += tl.load(own + at, mask=exists, other=0.0).to(tl.float32)
        else:
            total += tl.load(rows + row * stride.to(tl.int64) + at, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + at, (total * scale).to(out.dtype.element_ty), mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def _both_kernel(value, first, second, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < length
    found = tl.load(value + at, mask=exists, other=0.0)
    tl.store(first + at, found.to(first.dtype.element_ty), mask=exists)
    tl.store(second + at, found.to(second.dtype.element_ty), mask=exists)


class TritonRows:
    """What the kernels know: plain floating numbers that lie without gaps."""

    def __init__(self) -> None:
        self._rows = KeptKernel(_rows_kernel, _WARPS)
        self._both = KeptKernel(_both_kernel, _WARPS)

    def reduce(
        self, x: torch.Tensor, rows: torch.Tensor, op: str, own: torch.Tensor | None = None, at: int = 0
    ) -> bool:
        """``x`` becomes the sum or mean of ``rows``, ``own`` standing for one of them; False, and nothing done, for what the kernel
        does not know.
        """
        num_rows, length = rows.shape
        if x.dtype not in _ADDED or rows.dtype not in _ADDED or not 0 < num_rows <= _MOST_ROWS:
            return False
        if rows.stride(1) != 1 or x.stride(0) != 1 or length == 0:
            return False
        if own is not None and (own.dtype not in _ADDED or own.stride(0) != 1):
            return False
        scale, stands_for = 1.0 / num_rows if op == "mean" else 1.0, -1 if own is None else at
        self._rows(
            -(-length // _BLOCK),
            (rows, rows if own is None else own, x),
            (length, rows.stride(0)),
            (scale,),
            (num_rows, stands_for, _BLOCK),
        )
        return True

    def copy_both(self, first: torch.Tensor, second: torch.Tensor, value: torch.Tensor) -> bool:
        """Both become ``value``, and their writes are counted; False, and nothing done, for what the kernel does not know."""
        tensors = (value, first, second)
        if not all(each.dtype in _ADDED and each.is_contiguous() for each in tensors):
            return False
        length = value.numel()
        if length == 0 or not first.numel() == second.numel() == length:
            return False
        self._both(-(-length // _BLOCK), tensors, (length,), (), (_BLOCK,))
        written = [each for each in (first, second) if not each.is_inference()]
        if written:
            torch.autograd.graph.increment_version(written)
        return True
