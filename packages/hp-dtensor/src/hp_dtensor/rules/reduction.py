"""Reductions over tensor dims that are sums, products, and'S and or's: each rank's share is a share of the whole.

Over a dim that is cut every rank reduces its piece, and the result is a Partial of the same kind: no communication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor import across
from hp_dtensor.no_elements import has_gradients, is_complex, meeting, zeros_from
from hp_dtensor.placements import PARTIAL, Partial, Placement, Shard
from hp_dtensor.rules.along import (
    SUMS,
    checked_keepdim,
    dims_of,
    dropped,
    keeps_sums,
    lying,
    shape_without,
)
from hp_dtensor.rules.refusals import refused_if_no_dim_is_reduced
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec, local_block
from hp_platform import get_platform

__all__ = ["dims_of", "local_sum", "mean_over", "reduced", "sum_over"]

Tensor = Any


def reduced(
    spec: Spec, dim: Any, keepdim: bool, carried: Sequence[str], kind: Placement
) -> tuple[Outcome, tuple[int, ...], bool]:
    """How the result of a reduction lies; the dims that are reduced; and whether one of them is cut.

    ``carried`` are the kinds of Partial that go through; along a cut the result is a Partial of ``kind``.
    """
    checked_keepdim(keepdim)
    dims = dims_of(dim, len(spec.shape))
    inputs = lying(spec, (), carried)
    output: list[Placement] = []
    for placement in inputs:
        is_cut = isinstance(placement, Shard) and placement.dim in dims
        output.append(kind if is_cut else dropped((placement,), dims, keepdim)[0])
    return (
        Outcome((inputs,), tuple(output), shape_without(spec.shape, dims, keepdim)),
        dims,
        any(isinstance(p, Shard) and p.dim in dims for p in inputs),
    )


def lacks_elements(spec: Spec, outcome: Outcome, dims: Sequence[int]) -> bool:
    """Whether this rank's piece has nothing to reduce, although the whole has."""
    piece, _ = local_block(spec.shape, outcome.inputs[0], spec.mesh.shape, spec.mesh.get_coordinate())
    return any(piece[d] == 0 != spec.shape[d] for d in dims)


def neutral(
    function: Callable[..., Any],
    local: Tensor,
    args: Sequence[Any],
    named: Mapping[str, Any],
    dims: Sequence[int],
    keepdim: bool,
    value: Any,
) -> Tensor:
    """What a rank without elements adds to ``function(local, *args, **named)``: ``value``, with zeros as the gradient.

    ``value`` may be a function of the dtype of the result.
    """
    platform: Any = get_platform()
    device = platform.device_of(local)
    with platform.no_grad():
        probe = platform.zeros(tuple(n or 1 for n in local.shape), local.dtype, device)
        dtype = function(probe, *args, **named).dtype
    like = platform.full(
        shape_without(local.shape, dims, keepdim), value(dtype) if callable(value) else value, dtype, device
    )
    return zeros_from(like, [local]) + like if has_gradients(like) else like


def _given(options: Sequence[Any]) -> Any:
    """The one option that there may be."""
    return next((option for option in options if option is not None and option is not False), None)


@rule("sum", params=("input", ("dim", None), ("keepdim", False)))
def sum_over(x: Any, dim: Any = None, keepdim: bool = False, *rest: Any, **kwargs: Any) -> Outcome:
    """``x.sum(dim, keepdim)``."""
    options = (*rest, *kwargs.values())
    outcome, dims, is_cut = reduced(x, dim, keepdim, SUMS if keeps_sums(options) else (), PARTIAL)
    if not is_cut or 0 not in x.local_shape or _given(options) is not None:
        return outcome

    def run(local: Any, *_: Any, **__: Any) -> Any:
        return local_sum(local, dims, keepdim)

    return replace(outcome, run=run)


@rule("nansum", params=("input", ("dim", None), ("keepdim", False)))
def nansum(x: Any, dim: Any = None, keepdim: bool = False, *rest: Any, **kwargs: Any) -> Outcome:
    """The sum of what is a number. Not linear: NaN and a summand may make one."""
    outcome, _, _ = reduced(x, dim, keepdim, (), PARTIAL)
    return outcome


@rule("count_nonzero", params=("input", ("dim", None)))
def count_nonzero(x: Any, dim: Any = None) -> Outcome:
    """How many elements are not 0."""
    outcome, _, _ = reduced(x, dim, False, (), PARTIAL)
    return outcome


@rule("mean", params=("input", ("dim", None), ("keepdim", False)))
def mean_over(x: Any, dim: Any = None, keepdim: bool = False, *rest: Any, **kwargs: Any) -> Outcome:
    """``x.mean(dim, keepdim)``. Over a cut dim: local sums divided by the global count, since shards may be uneven."""
    options = (*rest, *kwargs.values())
    outcome, dims, is_cut = reduced(x, dim, keepdim, SUMS if keeps_sums(options) else (), PARTIAL)
    if not is_cut:
        return outcome
    count = math.prod(x.shape[d] for d in dims)
    dtype = _given(options)

    def run(local: Any, *_: Any, **__: Any) -> Any:
        local = as_floating(local, dtype, "mean")
        platform = get_platform()
        return platform.cast(local_sum(widened(local), dims, keepdim) / count, local.dtype)

    return replace(outcome, run=run)


@rule("nanmean", params=("input", ("dim", None), ("keepdim", False)))
def nanmean(x: Any, dim: Any = None, keepdim: bool = False, *rest: Any, **kwargs: Any) -> Outcome:
    """The mean of what is a number. Over a cut dim the ranks add up how many those are: one small all-reduce."""
    outcome, dims, is_cut = reduced(x, dim, keepdim, (), PARTIAL)
    if not is_cut:
        return outcome
    mesh_dims = across.cutting(x, dims)
    dtype = _given((*rest, *kwargs.values()))

    def run(local: Any, *_: Any, **__: Any) -> Any:
        platform = get_platform()
        local = as_floating(local, dtype, "nanmean")
        narrow, local = local.dtype, widened(local)
        is_number = local == local
        count = local_sum(platform.cast(platform.detach(is_number), local.dtype), dims, keepdim)
        kept = platform.where(is_number, local, platform.zeros_like(local))
        total = across.reduced(count, x, mesh_dims, "sum")
        return platform.cast(local_sum(kept, dims, keepdim) / total, narrow)

    return replace(outcome, run=run)


def as_floating(local: Tensor, dtype: Any, name: str) -> Tensor:
    """``local`` in the dtype that is asked for. ValueError if that is no floating one."""
    platform = get_platform()
    local = local if dtype is None else platform.cast(local, dtype)
    if not platform.is_floating(local.dtype):
        way_out = "would round: cast to a floating dtype"
        if is_complex(local):
            way_out = "is not built for what is cut: take it of x.real and x.imag, or of x.abs()"
        raise ValueError(f"{name} of {platform.dtype_name(local.dtype)} {way_out}")
    return local


def widened(local: Tensor) -> Tensor:
    """``local``, in float32 if it is of half precision: there sums overflow and round, which kernels avoid by the same."""
    platform = get_platform()
    return platform.cast(local, "float32") if platform.itemsize(local.dtype) < 4 else local


def local_sum(local: Any, dims: tuple[int, ...], keepdim: bool) -> Any:
    """See [Note: empty pieces] in hp_dtensor.no_elements."""
    platform = get_platform()
    if not dims:
        return local + 0
    if 0 not in local.shape:
        return platform.sum(local, dims, keepdim)
    with platform.no_grad():
        like = platform.sum(local, dims, keepdim)
    return zeros_from(like, [local])


def _folding(name: str, kind: str, value: Any, doc: str) -> Callable[..., Outcome]:
    """The rule of a reduction whose value is ``value`` where there is nothing to reduce."""

    @rule(name, params=("input", ("dim", None), ("keepdim", False)))
    def plan(x: Any, dim: Any = None, keepdim: bool = False, *rest: Any, **kwargs: Any) -> Outcome:
        outcome, dims, is_cut = reduced(x, dim, keepdim, (), Partial(kind))
        outcome = with_neutral(x, outcome, dims, keepdim, value) if is_cut else outcome
        if dim == () and kind in ("any", "all"):
            return refused_if_no_dim_is_reduced(outcome, len(x.shape))
        return met(outcome) if kind == "prod" else outcome

    plan.__doc__ = doc
    return plan


def with_neutral(x: Spec, outcome: Outcome, dims: Sequence[int], keepdim: bool, value: Any) -> Outcome:
    """The outcome, with :func:`neutral` where this rank has nothing to reduce."""
    if not lacks_elements(x, outcome, dims):
        return outcome

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda local, *args, **named: neutral(function, local, args, named, dims, keepdim, value)

    return replace(outcome, around=around)


def met(outcome: Outcome) -> Outcome:
    """Of an operation whose kernel's gradient depends on its input or not, as the piece's values are.

    See [Note: derivatives of every order] in hp_dtensor.no_elements.
    """
    if not get_platform().supports("double_backward") or all(p.is_replicate() for p in outcome.output or ()):
        return outcome
    inner = outcome.around

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        run = function if inner is None else inner(function)
        return lambda local, *args, **named: meeting(run(local, *args, **named), [local])

    return replace(outcome, around=around)


prod = _folding("prod", "prod", 1, "``x.prod(dim, keepdim)``: products of products.")
any_of = _folding("any", "any", False, "Whether some element is true.")
all_of = _folding("all", "all", True, "Whether every element is true.")
