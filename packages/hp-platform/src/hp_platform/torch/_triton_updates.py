"""Steps of optimizers on cuda that torch makes in several passes over memory, in one, by Triton. Imported where Triton is installed
and used first.

A step of momentum reads and writes memory five times as often as it must where every operation is a pass of its own, and torch
takes dtypes that differ by kernels that reach a third of the memory's speed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 2048
_WARPS = 8
_ADDED = frozenset({torch.float32, torch.bfloat16, torch.float16})


@triton.jit  # type: ignore[untyped-decorator]
def _momentum_kernel(  # type: ignore[no-untyped-def]
    momentum, grad, direction, length, mu, NESTEROV: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < length
    g = tl.load(grad + at, mask=exists).to(tl.float32)
    m = mu * tl.load(momentum + at, mask=exists) + g
    tl.store(momentum + at, m, mask=exists)
    if NESTEROV:
        m = mu * m + g
    tl.store(direction + at, m.to(direction.dtype.element_ty), mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def _move_kernel(param, update, length, keep, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < length
    u = tl.load(update + at, mask=exists).to(tl.float32)
    tl.store(param + at, keep * tl.load(param + at, mask=exists) + factor * u, mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def _quotient_kernel(x, divisor, out, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < length
    value = tl.load(x + row * length + at, mask=exists).to(tl.float32) / tl.load(divisor + row)
    tl.store(out + row * length + at, value.to(out.dtype.element_ty), mask=exists)


class TritonUpdates:
    """Launches by what a compiled kernel depends on: looking for it again costs the host more than the launch.

    Every function returns False, and has done nothing, for what its kernel does not know. Products are rounded before they are
    added up, as by one operation after the other.
    """

    def __init__(self) -> None:
        self._compiled: dict[Any, Any] = {}

    def momentum(
        self, m: torch.Tensor, g: torch.Tensor, direction: torch.Tensor, mu: float, *, nesterov: bool
    ) -> bool:
        """``m = mu m + g``, and ``direction`` becomes ``mu m + g`` or ``m``."""
        if m.dtype != torch.float32 or not _fits(m, g, direction):
            return False
        length = m.numel()
        self._launch(
            _momentum_kernel, (_blocks(length), 1, 1), (m, g, direction), (length, float(mu)), (nesterov,)
        )
        return True

    def move(self, p: torch.Tensor, update: torch.Tensor, keep: float, factor: float) -> bool:
        """``p = keep p + factor update``."""
        if p.dtype != torch.float32 or not _fits(p, update):
            return False
        length = p.numel()
        self._launch(
            _move_kernel, (_blocks(length), 1, 1), (p, update), (length, float(keep), float(factor)), ()
        )
        return True

    def quotient(self, x: torch.Tensor, divisor: torch.Tensor, out: torch.Tensor) -> bool:
        """``out = x / divisor``: one float32 number for each entry of the first dim of ``x``."""
        rows = x.shape[0] if x.dim() else 0
        if divisor.dtype != torch.float32 or divisor.numel() != rows or not divisor.is_contiguous():
            return False
        if not _fits(x, out) or rows >= 2**16:
            return False
        length = x.numel() // rows
        self._launch(_quotient_kernel, (_blocks(length), rows, 1), (x, divisor, out), (length,), ())
        return True

    def _launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[Any, ...],
        constants: tuple[Any, ...],
    ) -> None:
        index, length = tensors[0].device.index, numbers[0]
        # Of each argument by itself: a kernel compiled for an aligned one must not get another.
        kinds = [(x.dtype, x.data_ptr() % 16 == 0) for x in tensors]
        key = (kernel, index, constants, *kinds, length == 1, length % 16 == 0, length >= 2**31)
        with torch.accelerator.device_index(index):
            found = self._compiled.get(key)
            if found is None:
                # Fused, the product would not be rounded before the sum.
                options = {"num_warps": _WARPS, "enable_fp_fusion": False}
                self._compiled[key] = kernel[grid](*tensors, *numbers, *constants, _BLOCK, **options)
            else:
                found[grid](*tensors, *numbers, *constants, _BLOCK)


def _fits(*tensors: torch.Tensor) -> bool:
    """Whether each is whole, of a dtype that is known, and not empty, and all are of one size."""
    sizes = {x.numel() for x in tensors}
    return (
        len(sizes) == 1 and 0 not in sizes and all(x.dtype in _ADDED and x.is_contiguous() for x in tensors)
    )


def _blocks(length: int) -> int:
    return -(-length // _BLOCK)
