"""Sums and means over tensor dims. Over a dim that is cut each rank's sum is a summand of the whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.empty import zeros_from
from hp_dtensor.placements import PARTIAL, REPLICATE, Placement, Shard
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec
from hp_platform import get_platform


def reduced(
    spec: Spec, dim: Any, keepdim: bool, options: Sequence[Any] = ()
) -> tuple[Outcome, tuple[int, ...], bool]:
    """How the sum lies; the dims that are summed; and whether one of them is cut.

    ``options`` that are given, such as a dtype, convert the elements first: that is no longer linear.
    """
    is_linear = all(option is None for option in options)
    if not isinstance(keepdim, bool):
        raise ValueError(f"keepdim must be True or False, got {keepdim!r}")
    ndim = len(spec.shape)
    dims = dims_of(dim, ndim)
    shape = tuple(1 if i in dims else n for i, n in enumerate(spec.shape) if keepdim or i not in dims)
    inputs: list[Placement] = []
    output: list[Placement] = []
    for own in spec.placements:
        placement = own if is_linear or not own.is_partial() else REPLICATE
        inputs.append(placement)
        if not isinstance(placement, Shard):
            output.append(placement)  # a sum of sums is a sum
        elif placement.dim in dims:
            output.append(PARTIAL)
        else:
            output.append(Shard(placement.dim - (0 if keepdim else sum(d < placement.dim for d in dims))))
    is_cut = any(isinstance(p, Shard) and p.dim in dims for p in spec.placements)
    return Outcome((tuple(inputs),), tuple(output), shape), dims, is_cut


def dims_of(dim: Any, ndim: int) -> tuple[int, ...]:
    """The dims that ``dim`` (an int, several, or None or () for all) names, none negative. ValueError if one is missing."""
    given = tuple(range(ndim)) if dim is None or dim == () else (dim,) if isinstance(dim, int) else tuple(dim)
    if any(
        isinstance(d, bool) or not isinstance(d, int) or not -max(ndim, 1) <= d < max(ndim, 1) for d in given
    ):
        raise ValueError(f"dim {dim!r} does not fit a tensor with {ndim} dims")
    found = tuple(d % ndim for d in given) if ndim else ()
    if len(set(found)) != len(found):
        raise ValueError(f"dim {dim!r} names a dim twice")
    return found


@rule("sum", params=("input", ("dim", None), ("keepdim", False)))
def sum_over(x: Any, dim: Any = None, keepdim: bool = False, *rest: Any, **kwargs: Any) -> Outcome:
    """``x.sum(dim, keepdim)``."""
    options = (*rest, *kwargs.values())
    outcome, dims, is_cut = reduced(x, dim, keepdim, options)
    if not is_cut or 0 not in x.local_shape or any(option is not None for option in options):
        return outcome

    def run(local: Any, *_: Any, **__: Any) -> Any:
        return _sum(local, dims, keepdim)

    return replace(outcome, run=run)


@rule("mean", params=("input", ("dim", None), ("keepdim", False)))
def mean_over(x: Any, dim: Any = None, keepdim: bool = False, *rest: Any, **kwargs: Any) -> Outcome:
    """``x.mean(dim, keepdim)``. Over a cut dim: local sums divided by the global count, since shards may be uneven."""
    options = (*rest, *kwargs.values())
    outcome, dims, is_cut = reduced(x, dim, keepdim, options)
    if not is_cut:
        return outcome
    if any(option is not None for option in options):
        raise ValueError("mean over a dim that is cut takes no dtype: cast the tensor before")
    count = math.prod(x.shape[d] for d in dims)

    def run(local: Any, *_: Any, **__: Any) -> Any:
        platform = get_platform()
        if not platform.is_floating(local.dtype):
            raise ValueError(
                f"mean of {platform.dtype_name(local.dtype)} would round: cast to a floating dtype"
            )
        return _sum(local, dims, keepdim) / count

    return replace(outcome, run=run)


def _sum(local: Any, dims: tuple[int, ...], keepdim: bool) -> Any:
    """See [Note: empty pieces] in hp_dtensor.empty."""
    platform = get_platform()
    if 0 not in local.shape:
        return platform.sum(local, dims, keepdim)
    with platform.no_grad():
        like = platform.sum(local, dims, keepdim)
    return zeros_from(like, [local])
