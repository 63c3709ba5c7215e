"""Steps of optimizers on cuda that torch makes in several passes over memory, in one, by Triton. Imported where Triton is installed
and used first.

A step of momentum reads and writes memory five times as often as it must where every operation is a pass of its own, and torch
takes dtypes that differ by kernels that reach a third of the memory's speed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from hp_platform.torch._triton_products import TritonProducts

Tensors: TypeAlias = tuple[torch.Tensor, ...]

_BLOCK = 2048
# Fused, a product would not be rounded before the sum.
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
_ADDED = frozenset({torch.float32, torch.bfloat16, torch.float16})


@triton.jit  # type: ignore[untyped-decorator]
def _momentum(momentum, grad, direction, length, block, mu, NESTEROV: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < length
    g = tl.load(grad + at, mask=exists).to(tl.float32)
    m = mu * tl.load(momentum + at, mask=exists) + g
    tl.store(momentum + at, m, mask=exists)
    if NESTEROV:
        m = mu * m + g
    tl.store(direction + at, m.to(direction.dtype.element_ty), mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def _move(param, update, length, block, keep, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < length
    u = tl.load(update + at, mask=exists).to(tl.float32)
    tl.store(param + at, keep * tl.load(param + at, mask=exists) + factor * u, mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def _momentum_kernel(  # type: ignore[no-untyped-def]
    momentum, grad, direction, length, mu, NESTEROV: tl.constexpr, BLOCK: tl.constexpr
):
    _momentum(momentum, grad, direction, length, tl.program_id(0), mu, NESTEROV, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _move_kernel(param, update, length, keep, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    _move(param, update, length, tl.program_id(0), keep, factor, BLOCK)


@triton.jit(do_not_specialize=["end0", "end1", "end2"])  # type: ignore[untyped-decorator]
def _four_momenta_kernel(  # type: ignore[no-untyped-def]
    m0, m1, m2, m3, g0, g1, g2, g3, d0, d1, d2, d3,
    n0, n1, n2, n3, end0, end1, end2, mu, NESTEROV: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0)
    if block < end0:
        m, g, d, n, first = m0, g0, d0, n0, 0
    elif block < end1:
        m, g, d, n, first = m1, g1, d1, n1, end0
    elif block < end2:
        m, g, d, n, first = m2, g2, d2, n2, end1
    else:
        m, g, d, n, first = m3, g3, d3, n3, end2
    _momentum(m, g, d, n, block - first, mu, NESTEROV, BLOCK)


@triton.jit(do_not_specialize=["end0", "end1", "end2"])  # type: ignore[untyped-decorator]
def _four_moves_kernel(  # type: ignore[no-untyped-def]
    p0, p1, p2, p3, u0, u1, u2, u3,
    n0, n1, n2, n3, end0, end1, end2, keep, factor, BLOCK: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0)
    if block < end0:
        p, u, n, first = p0, u0, n0, 0
    elif block < end1:
        p, u, n, first = p1, u1, n1, end0
    elif block < end2:
        p, u, n, first = p2, u2, n2, end1
    else:
        p, u, n, first = p3, u3, n3, end2
    _move(p, u, n, block - first, keep, factor, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _move_by_kernel(param, update, length, numbers, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    _move(param, update, length, tl.program_id(0), tl.load(numbers), tl.load(numbers + 1), BLOCK)


@triton.jit(do_not_specialize=["end0", "end1", "end2"])  # type: ignore[untyped-decorator]
def _four_moves_by_kernel(  # type: ignore[no-untyped-def]
    p0, p1, p2, p3, u0, u1, u2, u3,
    n0, n1, n2, n3, end0, end1, end2, numbers, BLOCK: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0)
    if block < end0:
        p, u, n, first = p0, u0, n0, 0
    elif block < end1:
        p, u, n, first = p1, u1, n1, end0
    elif block < end2:
        p, u, n, first = p2, u2, n2, end1
    else:
        p, u, n, first = p3, u3, n3, end2
    _move(p, u, n, block - first, tl.load(numbers), tl.load(numbers + 1), BLOCK)


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
        self.products = TritonProducts()
        self._compiled: dict[Any, Any] = {}

    def momentum(self, entries: Iterable[Tensors], mu: float, *, nesterov: bool) -> list[Tensors]:
        """``m = mu m + g`` of each ``(m, g, d)``, and ``d`` becomes ``mu m + g`` or ``m``. Returns those that the kernel does not know."""
        return self._each(_momentum_kernel, _four_momenta_kernel, entries, (float(mu),), (nesterov,))

    def move(self, entries: Iterable[Tensors], keep: float, factor: float) -> list[Tensors]:
        """``p = keep p + factor u`` of each ``(p, u)``. Returns those that the kernel does not know."""
        return self._each(_move_kernel, _four_moves_kernel, entries, (float(keep), float(factor)), ())

    def move_by(self, entries: Iterable[Tensors], numbers: torch.Tensor) -> list[Tensors]:
        """:meth:`move` by ``numbers (2,)`` in float32 on the device, ``keep`` and ``factor``."""
        return self._each(_move_by_kernel, _four_moves_by_kernel, entries, (numbers,), ())

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
        of_one: Any,
        of_four: Any,
        entries: Iterable[Tensors],
        numbers: tuple[float | torch.Tensor, ...],
        constants: tuple[Any, ...],
    ) -> list[Tensors]:
        """Of entries on one device, whose first tensor is written; those that do not fit."""
        found = list(entries)
        left: list[Tensors] = []
        even: dict[tuple[torch.dtype, ...], list[Tensors]] = {}
        with torch.accelerator.device_index(found[0][0].device.index):
            for tensors in found:
                first = tensors[0]
                if first.dtype != torch.float32 or not _fits(*tensors):
                    left.append(tensors)
                elif _is_even(tensors):
                    even.setdefault(tuple(x.dtype for x in tensors), []).append(tensors)
                else:
                    self._launch(of_one, 1, first.numel(), tensors, numbers, constants)
            for dtypes, alike in even.items():
                for start in range(0, len(alike), 4):
                    self._launch_four(of_four, dtypes, alike[start : start + 4], numbers, constants)
        left_over = {id(tensors) for tensors in left}
        written = [x[0] for x in found if id(x) not in left_over and not x[0].is_inference()]
        if written:
            torch.autograd.graph.increment_version(written)
        return left

    def _launch_four(
        self,
        kernel: Any,
        dtypes: tuple[torch.dtype, ...],
        entries: list[Tensors],
        numbers: tuple[float | torch.Tensor, ...],
        constants: tuple[Any, ...],
    ) -> None:
        """Of one to four entries that are even: few launches, and none so short that starting it takes as long."""
        lengths = [tensors[0].numel() for tensors in entries]
        ends = list(accumulate(-(-length // _BLOCK) for length in lengths))
        padding = 4 - len(entries)  # with entries that get no block
        padded = [*entries, *entries[-1:] * padding]
        operands = [tensors[place] for place in range(len(dtypes)) for tensors in padded]
        arguments = (
            *lengths,
            *lengths[-1:] * padding,
            *ends[:3],
            *ends[-1:] * (3 - len(ends)),
            *numbers,
        )
        key = (kernel, entries[0][0].device.index, constants, *dtypes, *_kinds(numbers))
        grid = (ends[-1], 1, 1)
        found = self._compiled.get(key)
        if found is None:
            self._compiled[key] = kernel[grid](*operands, *arguments, *constants, _BLOCK, **_OPTIONS)
        else:
            found[grid](*_passed(operands), *_passed(arguments), *constants, _BLOCK)

    def _launch(
        self,
        kernel: Any,
        rows: int,
        length: int,
        tensors: Tensors,
        numbers: tuple[float | torch.Tensor, ...],
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
            *_kinds(numbers),
            length == 1,
            length % 16 == 0,
            length >= 2**31,
        )
        grid = (-(-length // _BLOCK), rows, 1)
        found = self._compiled.get(key)
        if found is None:
            self._compiled[key] = kernel[grid](*tensors, length, *numbers, *constants, _BLOCK, **_OPTIONS)
        else:
            found[grid](*_passed(tensors), length, *_passed(numbers), *constants, _BLOCK)


def _passed(arguments: Iterable[Any]) -> list[Any]:
    """Tensors by their addresses: of a tensor the launcher asks the driver whether its memory can be reached."""
    return [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]


def _kinds(numbers: Iterable[Any]) -> list[bool]:
    """What a compiled kernel depends on of those that are tensors."""
    return [x.data_ptr() % 16 == 0 for x in numbers if isinstance(x, torch.Tensor)]


def _fits(*tensors: torch.Tensor) -> bool:
    """Whether each is whole, of a dtype that is known, and not empty, and all are of one size."""
    size = tensors[0].numel()
    return size > 0 and all(x.numel() == size and x.dtype in _ADDED and x.is_contiguous() for x in tensors)


def _is_even(tensors: Tensors) -> bool:
    """Whether one compiled kernel does for all such: memory that is aligned, and lengths that vectors divide, 32 bits wide."""
    length = tensors[0].numel()
    return length % 16 == 0 and length < 2**31 and all(x.data_ptr() % 16 == 0 for x in tensors)
