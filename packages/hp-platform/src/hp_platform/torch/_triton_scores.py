"""Cross-entropy of scores on cuda, by Triton: each pass over the scores is one launch. Imported where Triton is installed, at first use.

Composed of torch's operations the same is five passes forward and six backward, in float32, for which 16-bit scores are copied.
The formulas and names are those of :class:`hp_platform.protocols.ScoreKernels`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hp_platform.torch._triton_kept import KeptKernel

_BLOCK = 2048  # classes of a step of a program of 4 warps: 16 per thread
_ROWS = 128  # rows of a program that works on told numbers alone


@triton.jit  # type: ignore[untyped-decorator]
def _sums_kernel(  # type: ignore[no-untyped-def]
    scores, target, weights, told, count, classes, stride, start, ignore_index,
    IS_FIRST: tl.constexpr, HAS_SPREAD: tl.constexpr, IS_WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row per program. Every lane has a largest score and a sum of its own until the end: no step waits for other lanes."""
    row = tl.program_id(0)
    x = scores + row.to(tl.int64) * stride
    at = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    powers = tl.zeros((BLOCK,), tl.float32)
    spread = tl.zeros((BLOCK,), tl.float32)
    whole_weight = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, classes, BLOCK):
        column = begin + at
        exists = column < classes
        value = tl.load(x + column, mask=exists, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(largest, value)  # not NaN where one of them is a number
        origin = tl.where(higher == float("-inf"), 0.0, higher)
        powers = powers * tl.exp(largest - origin) + tl.exp(value - origin)
        largest = higher
        if HAS_SPREAD:
            value = tl.where(exists, value, 0.0)
            if IS_WEIGHTED:
                weight = tl.load(weights + column, mask=exists, other=0.0).to(tl.float32)
                whole_weight += weight
                value = value * weight
            spread += value
    most = tl.max(largest, 0)
    power = tl.sum(powers * tl.exp(largest - tl.where(most == float("-inf"), 0.0, most)), 0)
    goal = tl.load(target + row).to(tl.int64)
    place = goal - start
    is_mine = (goal != ignore_index) & (place >= 0) & (place < classes)
    chosen = tl.load(x + place, mask=is_mine, other=0.0).to(tl.float32)
    out = told + row
    if not IS_FIRST:
        before = tl.load(out)
        higher_most = tl.maximum(before, most)
        base = tl.where(higher_most == float("-inf"), 0.0, higher_most)
        power = tl.load(out + count) * tl.exp(before - base) + power * tl.exp(most - base)
        most = higher_most
        chosen += tl.load(out + 2 * count)
    tl.store(out, most)
    tl.store(out + count, power)
    tl.store(out + 2 * count, chosen)
    if IS_WEIGHTED:
        own = tl.load(weights + place, mask=is_mine, other=0.0).to(tl.float32)
        if not IS_FIRST:
            own += tl.load(out + 3 * count)
        tl.store(out + 3 * count, own)
    if HAS_SPREAD:
        total = tl.sum(spread, 0)
        if not IS_FIRST:
            total += tl.load(out + (3 + IS_WEIGHTED) * count)
        tl.store(out + (3 + IS_WEIGHTED) * count, total)
        if IS_WEIGHTED:
            whole = tl.sum(whole_weight, 0)
            if not IS_FIRST:
                whole += tl.load(out + 5 * count)
            tl.store(out + 5 * count, whole)


@triton.jit  # type: ignore[untyped-decorator]
def _losses_kernel(  # type: ignore[no-untyped-def]
    told, target, losses, counts, lse, of_softmax, of_target, known, count, parts, ignore_index, of_chosen, each, classes,
    HAS_SPREAD: tl.constexpr, IS_WEIGHTED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of a program put together what ``parts`` ranks have told of them."""
    LINES: tl.constexpr = 3 + IS_WEIGHTED + HAS_SPREAD + IS_WEIGHTED * HAS_SPREAD
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < count
    goal = tl.load(target + row, mask=exists, other=0).to(tl.int64)
    is_kept = goal != ignore_index
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    power = tl.zeros((ROWS,), tl.float32)
    chosen = tl.zeros((ROWS,), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    spread = tl.zeros((ROWS,), tl.float32)
    whole = tl.zeros((ROWS,), tl.float32)
    for part in range(parts):
        line = told + part * LINES * count + row
        own = tl.load(line, mask=exists, other=0.0)
        higher = tl.maximum(most, own)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        own_power = tl.load(line + count, mask=exists, other=1.0)
        power = power * tl.exp(most - base) + own_power * tl.exp(own - base)
        most = higher
        chosen += tl.load(line + 2 * count, mask=exists, other=0.0)
        if IS_WEIGHTED:
            weight += tl.load(line + 3 * count, mask=exists, other=0.0)
        if HAS_SPREAD:
            spread += tl.load(line + (3 + IS_WEIGHTED) * count, mask=exists, other=0.0)
            if IS_WEIGHTED:
                whole += tl.load(line + 5 * count, mask=exists, other=0.0)
    log = tl.where(most == float("-inf"), 0.0, most) + tl.log(power)
    counted = tl.where(is_kept, 1.0, 0.0)
    if IS_WEIGHTED:
        counted = tl.where(is_kept, weight, 0.0)
    b = counted * of_chosen
    a = b
    loss = a * log - b * chosen
    if HAS_SPREAD:
        if not IS_WEIGHTED:
            whole += classes
        a = tl.where(is_kept, b + each * whole, 0.0)
        loss = a * log - b * chosen - each * spread
    tl.store(losses + row, tl.where(is_kept, loss, 0.0), mask=exists)
    tl.store(counts + row, counted, mask=exists)
    tl.store(lse + row, log, mask=exists)
    tl.store(of_softmax + row, a, mask=exists)
    tl.store(of_target + row, b, mask=exists)
    tl.store(known + row, tl.where(is_kept, goal, 0), mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(  # type: ignore[no-untyped-def]
    scores, out, target, weights, lse, of_softmax, of_target, incoming,
    classes, stride, out_stride, incoming_stride, start, ignore_index, each,
    HAS_SPREAD: tl.constexpr, IS_WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of a row per program; the grid has one axis: the others are short on some devices."""
    per_row = tl.cdiv(classes, BLOCK)
    row = tl.program_id(0) // per_row
    column = tl.program_id(0) % per_row * BLOCK + tl.arange(0, BLOCK)
    exists = column < classes
    wide = row.to(tl.int64)
    value = tl.load(scores + wide * stride + column, mask=exists, other=0.0).to(tl.float32)
    goal = tl.load(target + row).to(tl.int64)
    is_kept = goal != ignore_index
    g = tl.where(is_kept, tl.load(incoming + wide * incoming_stride).to(tl.float32), 0.0)
    a = g * tl.load(of_softmax + row)
    b = g * tl.load(of_target + row)
    gradient = a * tl.exp(value - tl.load(lse + row))
    gradient = tl.where((column == goal - start) & is_kept, gradient - b, gradient)
    if HAS_SPREAD:
        share = g * each
        if IS_WEIGHTED:
            gradient -= share * tl.load(weights + column, mask=exists, other=0.0).to(tl.float32)
        else:
            gradient -= share
    tl.store(out + wide * out_stride + column, gradient.to(out.dtype.element_ty), mask=exists)


class TritonScores:
    """See :class:`hp_platform.protocols.ScoreKernels`."""

    dtypes = frozenset({torch.float32, torch.bfloat16, torch.float16})  # float64 would lose digits

    def __init__(self) -> None:
        self._sums = KeptKernel(_sums_kernel, 4)
        self._losses = KeptKernel(_losses_kernel, 4)
        self._gradient = KeptKernel(_gradient_kernel, 4)

    def sums(
        self,
        scores: torch.Tensor,
        target: torch.Tensor,
        weights: torch.Tensor | None,
        *,
        start: int,
        ignore_index: int,
        has_spread: bool,
        told: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One launch, one pass."""
        scores, target = _rowwise(scores.detach()), target.contiguous()
        count, classes = scores.shape
        is_first, is_weighted = told is None, weights is not None
        if told is None:
            lines = 3 + is_weighted + has_spread + (is_weighted and has_spread)
            told = torch.empty((lines, count), dtype=torch.float32, device=scores.device)
        self._sums(
            count,
            (scores, target, told if weights is None else weights.detach().contiguous(), told),
            (count, classes, scores.stride(0), start, ignore_index),
            (),
            (is_first, has_spread, is_weighted, _BLOCK),
        )
        return told

    def losses(
        self,
        told: torch.Tensor,
        target: torch.Tensor,
        *,
        num_classes: int,
        ignore_index: int,
        label_smoothing: float,
        is_weighted: bool,
    ) -> tuple[torch.Tensor, ...]:
        """One launch on numbers of rows."""
        has_spread, count = label_smoothing > 0, told.shape[-1]
        lines = 3 + is_weighted + has_spread + (is_weighted and has_spread)
        found = [torch.empty(count, dtype=torch.float32, device=told.device) for _ in range(5)]
        known = torch.empty(count, dtype=torch.int64, device=told.device)
        self._losses(
            -(-count // _ROWS),
            (told, target.contiguous(), *found, known),
            (count, told.numel() // max(1, count * lines), ignore_index),
            (1.0 - label_smoothing, label_smoothing / num_classes, float(num_classes)),
            (has_spread, is_weighted, _ROWS),
        )
        return *found, known

    def gradient(
        self,
        scores: torch.Tensor,
        out: torch.Tensor,
        target: torch.Tensor,
        weights: torch.Tensor | None,
        factors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        incoming: torch.Tensor,
        *,
        start: int,
        ignore_index: int,
        of_spread: float,
    ) -> torch.Tensor:
        """One launch, one pass."""
        scores = _rowwise(scores.detach())
        count, classes = scores.shape
        self._gradient(
            count * -(-classes // _BLOCK),
            (
                scores,
                out,
                target.contiguous(),
                scores if weights is None else weights.detach().contiguous(),
                *factors,
                incoming,
            ),
            (classes, scores.stride(0), out.stride(0), incoming.stride(0), start, ignore_index),
            (of_spread,),
            (of_spread != 0, weights is not None, _BLOCK),
        )
        return out


def _rowwise(x: torch.Tensor) -> torch.Tensor:
    """With the classes of a row one after the other."""
    return x if x.stride(1) == 1 else x.contiguous()
