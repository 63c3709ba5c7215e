r"""What a rank can tell of the rows of its scores, and the loss that all ranks together make of it.

Of a row with scores ``x`` and target ``t``, class weights ``w`` (1 each if there are none), smoothing ``s`` and ``C`` classes::

    lse  = log(sum over c of exp(x_c))
    loss = (1 - s) w_t (lse - x_t) + s / C * sum over c of w_c (lse - x_c)
         = a lse - b x_t - e S      with  b = (1 - s) w_t,  e = s / C,  a = b + e sum(w),  S = sum over c of w_c x_c
    d loss / d x_c = a exp(x_c - lse) - b [c = t] - e w_c

So of the other ranks' scores a rank needs four numbers per row (the largest, the sum of exponentials, ``x_t``, ``S``), and for
the gradient of its own ones ``lse`` alone. Each rank measures from its own largest score, ``m_r``, and multiplies by
``exp(m_r - m)`` when it knows the largest of all, ``m``: the exponentials do not wait for the other ranks.

Scores are ``(n, c)`` or ``(n, c, d)`` with the classes in dim 1, what is said of rows ``(n,)`` or ``(n, d)``.
Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3; Szegedy et al., arXiv 1512.00567, section 7 (smoothing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.rules.refusals import refuse_beyond
from hp_platform import get_platform
from hp_tp.loss.classes import ClassCut
from hp_tp.loss.options import LossOptions

Tensor = Any
BLOCK = 2**24
"""So many scores are worked on at a time: 64 MB of float32 for what lives within a step of the computation."""
BLOCK_IN_CACHE = 2**20
"""The same where work is not queued: 4 MB stay in the cache of a CPU. Elsewhere the host would not keep up with such small pieces."""


# ---------------------------------------------------------------------------------------------------------------- targets
@dataclass(frozen=True)
class Targets:
    """The targets of the rows, as this rank sees them."""

    ids: Tensor
    """The class's number among this rank's; 0 where it is another rank's."""
    is_mine: Tensor
    is_kept: Tensor
    """Whether it is not the one that is ignored."""
    of_all: Tensor
    """The class's number among all; 0 where it is ignored."""


def targets_of(target: Tensor, cut: ClassCut, ignore_index: int) -> Targets:
    """Which targets are this rank's."""
    platform = get_platform()
    target = platform.cast(platform.detach(target), "int64")
    is_kept = target != ignore_index
    is_mine = is_kept & (target >= cut.start) & (target < cut.start + cut.size)
    zeros = platform.zeros_like(target)
    known = platform.where(is_kept, target, zeros)
    return Targets(platform.where(is_mine, target - cut.start, zeros), is_mine, is_kept, known)


def refuse_unknown(targets: Targets, num_classes: int) -> None:
    """Let the framework's kernels refuse targets that are no classes, on all ranks that have them: none owns these."""
    if 0 not in targets.of_all.shape:
        refuse_beyond(targets.of_all, num_classes)


# ------------------------------------------------------------------------------------------------------------------- sums
@dataclass(frozen=True)
class RowSums:
    """What some ranks' scores add up to, row by row."""

    powers: Tensor
    """``sum of exp(x - base(largest))``."""
    chosen: Tensor
    """The score of the target; 0 where it is not among these."""
    spread: Tensor | None
    """``S``, if it is asked for."""


def base(largest: Tensor) -> Tensor:
    """What exponents are measured from: the largest score, but 0 for rows that hold -inf alone, whose powers are then 0."""
    platform = get_platform()
    return platform.where(largest == float("-inf"), platform.zeros_like(largest), largest)


def wide(dtype: Any) -> str:
    """The name of the dtype in which sums over scores of ``dtype`` are taken: float32 for 16-bit ones."""
    platform = get_platform()
    return "float32" if platform.itemsize(dtype) < 4 else platform.dtype_name(dtype)


def largest_of(x: Tensor) -> Tensor:
    """The largest score of each row, -inf where there are none."""
    platform = get_platform()
    dtype = wide(x.dtype)
    if x.shape[1] == 0:
        return platform.full((x.shape[0], *x.shape[2:]), float("-inf"), dtype, platform.device_of(x))
    return platform.cast(platform.amax(x, 1), dtype)


def row_sums(
    x: Tensor, largest: Tensor, targets: Targets, weights: Tensor | None, has_spread: bool
) -> RowSums:
    """The sums over this rank's scores ``x``, block by block, so that a 16-bit ``x`` is never held in float32 as a whole."""
    platform = get_platform()
    if x.shape[1] == 0:
        zeros = platform.zeros_like(largest)
        return RowSums(zeros, zeros, zeros if has_spread else None)
    found: list[list[Tensor]] = []
    for start, length in blocks(x):
        part, origin, ids, is_mine = [
            rows_of(y, start, length) for y in (x, base(largest), targets.ids, targets.is_mine)
        ]
        found.append(_sums_of_block(part, origin, ids, is_mine, weights, has_spread))
    return RowSums(*_joined(found))


def _sums_of_block(
    x: Tensor, origin: Tensor, ids: Tensor, is_mine: Tensor, weights: Tensor | None, has_spread: bool
) -> list[Tensor]:
    platform = get_platform()
    x = platform.cast(x, wide(x.dtype))
    powers = platform.sum(platform.exp(x - along_classes(origin)), 1)
    taken = at_classes(x, ids)
    chosen = platform.where(is_mine, taken, platform.zeros_like(taken))
    if not has_spread:
        return [powers, chosen]
    return [powers, chosen, platform.sum(x if weights is None else x * of_classes(weights, x), 1)]


def _joined(found: list[list[Tensor]]) -> list[Any]:
    columns = (
        found[0] if len(found) == 1 else [get_platform().cat(parts) for parts in zip(*found, strict=True)]
    )
    return [*columns, None] if len(columns) == 2 else list(columns)


# ------------------------------------------------------------------------------------------------------------------- loss
@dataclass(frozen=True)
class RowLosses:
    """The losses of the rows, and what their gradients need."""

    losses: Tensor
    """0 where the target is ignored."""
    counts: Tensor
    """What a row counts in a mean: the weight of its target, 0 where that is ignored."""
    lse: Tensor
    of_softmax: Tensor
    """``a``; 0 where the target is ignored."""
    of_target: Tensor
    """``b``; 0 where the target is ignored."""


def spread_factor(options: LossOptions, cut: ClassCut) -> float:
    """``e``."""
    return options.label_smoothing / cut.num_classes


def losses_of_rows(
    cut: ClassCut,
    options: LossOptions,
    largest: Tensor,
    wait_for_largest: Callable[[], Tensor],
    sums: RowSums,
    targets: Targets,
    weight: Tensor | None,
) -> RowLosses:
    """The loss of every row, from all ranks' sums: one all-reduce, of all that each rank has to tell.

    ``largest`` is this rank's, which its ``sums`` are measured from; the other one is that of all ranks.
    """
    platform = get_platform()
    zeros = platform.zeros_like(largest)
    origin = base(wait_for_largest())
    told = [sums.powers * platform.exp(largest - origin), sums.chosen]
    if sums.spread is not None:
        told.append(sums.spread)
    of_target = None if weight is None else _weights_of_targets(weight, targets, options.is_weight_cut)
    whole_weight = None if weight is None else platform.sum(platform.cast(weight, largest.dtype))
    if options.is_weight_cut:
        told.extend([platform.cast(of_target, largest.dtype), whole_weight])
    told = _total(cut, told)
    powers, chosen, *rest = told
    spread = rest[0] if sums.spread is not None else None
    if options.is_weight_cut:
        of_target, whole_weight = told[-2:]
    lse = origin + platform.log(powers)
    counts = platform.cast(targets.is_kept, largest.dtype)
    if of_target is not None:
        counts = platform.where(targets.is_kept, platform.cast(of_target, largest.dtype), zeros)
    b = counts * number(1.0 - options.label_smoothing, counts)
    a, e = b, number(spread_factor(options, cut), counts)
    if spread is not None:
        all_weights = number(cut.num_classes, counts) if whole_weight is None else whole_weight
        a = platform.where(targets.is_kept, b + e * all_weights, zeros)
    losses = a * lse - b * chosen
    losses = losses if spread is None else losses - e * spread
    return RowLosses(platform.where(targets.is_kept, losses, zeros), counts, lse, a, b)


def _weights_of_targets(weight: Tensor, targets: Targets, is_cut: bool) -> Tensor:
    """The weights of the targets' classes; 0 where the weights are cut and the class is another rank's."""
    platform = get_platform()
    ids = targets.ids if is_cut else targets.of_all
    if weight.shape[0] == 0:
        return platform.zeros(tuple(ids.shape), weight.dtype, platform.device_of(weight))
    taken = platform.reshape(platform.take_along(weight, 0, platform.reshape(ids, (-1,))), tuple(ids.shape))
    return platform.where(targets.is_mine, taken, platform.zeros_like(taken)) if is_cut else taken


def _total(cut: ClassCut, told: Sequence[Tensor]) -> list[Tensor]:
    """The sums over ranks, in one collective."""
    platform = get_platform()
    if not cut.groups:
        return list(told)
    shapes = [tuple(x.shape) for x in told]
    flat = [platform.reshape(x, (-1,)) for x in told]
    parts = platform.split(cut.total(platform.cat(flat)), [x.shape[0] for x in flat])
    return [platform.reshape(x, shape) for x, shape in zip(parts, shapes, strict=True)]


# ---------------------------------------------------------------------------------------------------------------- helpers
def along_classes(rows: Tensor) -> Tensor:
    """One number per row as ``(n, 1)`` or ``(n, 1, d)``."""
    return get_platform().reshape(rows, (rows.shape[0], 1, *rows.shape[1:]))


def at_classes(x: Tensor, ids: Tensor) -> Tensor:
    """The score of one class per row."""
    return get_platform().reshape(get_platform().take_along(x, 1, along_classes(ids)), tuple(ids.shape))


def of_classes(weights: Tensor, x: Tensor) -> Tensor:
    """One number per class, to stand beside ``x``, in its dtype."""
    platform = get_platform()
    return platform.reshape(platform.cast(weights, x.dtype), (1, -1, *(1,) * (x.ndim - 2)))


def number(value: float, like: Tensor) -> Tensor:
    """A constant, exact in the dtype of ``like``: a bare one is float32 where a framework says so."""
    platform = get_platform()
    return platform.full((), value, like.dtype, platform.device_of(like))


def block_size(x: Tensor) -> int:
    """How many scores are worked on at a time where ``x`` is."""
    platform = get_platform()
    return BLOCK if platform.supports("streams", platform.device_of(x)) else min(BLOCK, BLOCK_IN_CACHE)


def blocks(x: Tensor) -> Iterator[tuple[int, int]]:
    """``(start, length)`` of the rows that are worked on at a time."""
    rows = x.shape[0]
    per_row = 1
    for size in x.shape[1:]:
        per_row = per_row * size
    length = max(1, block_size(x) // max(1, per_row))
    if rows <= length:
        yield 0, rows
        return
    for start in range(0, rows, length):
        yield start, min(length, rows - start)


def rows_of(x: Tensor, start: int, length: int) -> Tensor:
    """Some rows; the tensor itself if these are all."""
    return x if length == x.shape[0] else get_platform().narrow(x, 0, start, length)
