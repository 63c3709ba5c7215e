"""Steps of optimizers on cuda that torch makes in several passes over memory, in one, by Triton. Imported where Triton is installed
and used first.

A step of momentum reads and writes memory five times as often as it must where every operation is a pass of its own, and torch
takes dtypes that differ by kernels that reach a third of the memory's speed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

Tensors: TypeAlias = tuple[torch.Tensor, ...]

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

    Products are rounded before they are added up, as by one operation after the other. Writes are counted.
    """

    def __init__(self) -> None:
        self._compiled: dict[Any, Any] = {}

    def momentum(self, entries: Iterable[Tensors], mu: float, *, nesterov: bool) -> list[Tensors]:
        """``m = mu m + g`` of each ``(m, g, d)``, and ``d`` becomes ``mu m + g`` or ``m``. Returns those that the kernel does not know."""
        return self._each(_momentum_kernel, entries, (float(mu),), (nesterov,))

    def move(self, entries: Iterable[Tensors], keep: float, factor: float) -> list[Tensors]:
        """``p = keep p + factor u`` of each ``(p, u)``. Returns those that the kernel does not know."""
        return self._each(_move_kernel, entries, (float(keep), float(factor)), ())

    def quotient(self, x: torch.Tensor, divisor: torch.Tensor, out: torch.Tensor) -> bool:
        """``out = x / divisor``: one float32 number for each entry of the first dim of ``x``. False, and nothing done, for what the
        kernel does not know.
        """
        rows = x.shape[0] if x.dim() else 0
        if divisor.dtype != torch.float32 or divisor.numel() != rows or not divisor.is_contiguous():
            return False
        if not _fits(x, out) or rows >= 2**16:
            return False
        with torch.accelerator.device_index(x.device.index):
            self._launch(_quotient_kernel, rows, x.numel() // rows, (x, divisor, out), (), ())
        return True

    def _each(
        self,
        kernel: Any,
        entries: Iterable[Tensors],
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
    ) -> list[Tensors]:
        """Of entries on one device, whose first tensor is written; those that do not fit."""
        found = list(entries)
        left: list[Tensors] = []
        written = []
        with torch.accelerator.device_index(found[0][0].device.index):
            for tensors in found:
                first = tensors[0]
                if first.dtype != torch.float32 or not _fits(*tensors):
                    left.append(tensors)
                    continue
                self._launch(kernel, 1, first.numel(), tensors, numbers, constants)
                if not first.is_inference():
                    written.append(first)
        if written:
            torch.autograd.graph.increment_version(written)
        return left

    def _launch(
        self,
        kernel: Any,
        rows: int,
        length: int,
        tensors: Tensors,
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
    ) -> None:
        """Of ``length`` elements, ``rows`` times."""
        # Of each argument by itself: a kernel compiled for an aligned one must not get another.
        kinds = [(x.dtype, x.data_ptr() % 16 == 0) for x in tensors]
        key = (
            kernel,
            tensors[0].device.index,
            constants,
            *kinds,
            length == 1,
            length % 16 == 0,
            length >= 2**31,
        )
        grid = (-(-length // _BLOCK), rows, 1)
        found = self._compiled.get(key)
        if found is None:
            # Fused, the product would not be rounded before the sum.
            options = {"num_warps": _WARPS, "enable_fp_fusion": False}
            self._compiled[key] = kernel[grid](*tensors, length, *numbers, *constants, _BLOCK, **options)
        else:
            found[grid](*tensors, length, *numbers, *constants, _BLOCK)


def _fits(*tensors: torch.Tensor) -> bool:
    """Whether each is whole, of a dtype that is known, and not empty, and all are of one size."""
    size = tensors[0].numel()
    return size > 0 and all(x.numel() == size and x.dtype in _ADDED and x.is_contiguous() for x in tensors)
