"""Operations along a dim: cumulative ones, the largest, sorting, order statistics.

Cuts of the other dims stay. Along a cut of the dim itself cumulative operations go on where the rank before ends, and few of
many are found among the ranks' best (:mod:`hp_dtensor.rules.over_ranks`). Sorting and order statistics join it: any element may
belong to any place, and a kernel gives one statistic, not the candidates for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.placements import REPLICATE, Shard
from hp_dtensor.rules.along import SUMS, checked_keepdim, dim_of, dims_of, keeps_sums, lying, result_of
from hp_dtensor.rules.over_ranks import (
    best_of_ranks,
    is_worth_it,
    pieces_along,
    scanned,
    scanned_with_places,
)
from hp_dtensor.rules.reduction import met
from hp_dtensor.rules.registry import Outcome, Result, rule
from hp_dtensor.spec import Spec

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@rule("cumsum", params=("input", "dim"))
def cumsum(x: Any, dim: Any, *rest: Any, **kwargs: Any) -> Outcome:
    """Sums of all before and itself. Linear; a dtype that is asked for must be floating for that."""
    return _running(x, dim, SUMS if keeps_sums((*rest, *kwargs.values())) else ())


@rule("cumulative", params=("input", "dim"))
def cumulative(x: Any, dim: Any, *rest: Any, **kwargs: Any) -> Outcome:
    """cumprod, logcumsumexp."""
    return met(_running(x, dim, ()))


def _running(x: Spec, dim: Any, carried: Sequence[str]) -> Outcome:
    """Along a cut dim one all-gather of a slice per rank and mesh dim. See [Note: running reductions] in over_ranks."""
    dims = dim_of(dim, len(x.shape))
    lies = lying(x, (), carried)
    found = Outcome((lies,), lies, x.shape)
    pieces = pieces_along(x, lies, dims[0]) if dims else None
    return found if pieces is None else replace(found, around=scanned(pieces), meets_others=True)


@rule("cumulative_extreme", params=("input", "dim"))
def cumulative_extreme(x: Any, dim: Any) -> Outcome:
    """cummax, cummin: values and indices. Along a cut dim two all-gathers of a slice per rank and mesh dim."""
    dims = dim_of(dim, len(x.shape))
    lies = lying(x)
    result = Result(lies, x.shape)
    pieces = pieces_along(x, lies, dims[0]) if dims else None
    around = None if pieces is None else scanned_with_places(pieces)
    return Outcome((lies,), None, around=around, outputs=(result, result))


@rule("topk", params=("input", "k", ("dim", -1), ("largest", True), ("sorted", True)))
def topk(x: Any, k: int, dim: int = -1, *order: Any) -> Outcome:
    """The ``k`` largest or smallest along ``dim``: values and indices.

    Along a cut dim, if ``k`` is at most a quarter of a piece: two all-gathers per mesh dim, of ``k`` candidates per rank. A
    larger ``k`` joins the dim.
    """
    dims = dim_of(dim, len(x.shape))
    if isinstance(k, bool) or not isinstance(k, int):
        raise ValueError(f"k must be an int, got {k!r}")
    if dims and not 0 <= k <= x.shape[dims[0]]:
        raise ValueError(f"k = {k} of a dim of size {x.shape[dims[0]]}: there are not so many")
    lies = lying(x)
    pieces = pieces_along(x, lies, dims[0]) if dims else None
    around = None
    if pieces is not None and k and is_worth_it(pieces, k):
        around = best_of_ranks(pieces)
    else:
        lies = lying(x, dims)
    output = tuple(REPLICATE if isinstance(p, Shard) and p.dim in dims else p for p in lies)
    result = Result(output, tuple(k if i in dims else n for i, n in enumerate(x.shape)))
    return Outcome((lies,), None, around=around, outputs=(result, result))


def _sort_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """``(input, dim, descending, stable)`` of all spellings; torch also takes stable before dim, by name only."""
    rest = dict(kwargs)
    given = list(args)
    x = given.pop(0) if given else rest.pop("input")
    dim = given.pop(0) if given else rest.pop("dim", rest.pop("axis", -1))
    descending = given.pop(0) if given else rest.pop("descending", False)
    stable = given.pop(0) if given else rest.pop("stable", None)
    if given or rest:
        raise ValueError(f"takes (input, dim, descending, stable), got also {[*given, *rest]}")
    return (x, dim, descending, stable), {}


def _sorting(name: str, *, with_values: bool) -> None:
    @rule(name, params=("input",), normalise=_sort_arguments)
    def plan(x: Any, dim: int = -1, descending: bool = False, stable: Any = None) -> Outcome:
        lies = lying(x, dim_of(dim, len(x.shape)))
        options = {} if stable is None else {"stable": stable}

        def around(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda local, *_: function(local, dim=dim, descending=descending, **options)

        result = Result(lies, x.shape)
        outputs = (result, result) if with_values else None
        return Outcome((lies,), None if with_values else lies, x.shape, around=around, outputs=outputs)

    plan.__doc__ = f"``{name}(x, dim=-1, descending=False, stable=False)``."


_sorting("sort", with_values=True)
_sorting("argsort", with_values=False)


@rule("msort", params=("input",))
def msort(x: Any) -> Outcome:
    """Sorted along the first dim."""
    lies = lying(x, (0,))
    return Outcome((lies,), lies, x.shape)


@rule("kthvalue", params=("input", "k", ("dim", -1), ("keepdim", False)))
def kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Outcome:
    """The k-th smallest along ``dim``: value and index."""
    return _order_statistic(x, dim, keepdim)


@rule("order_statistic", params=("input", ("dim", -1), ("keepdim", False)))
def order_statistic(x: Any, dim: int = -1, keepdim: bool = False) -> Outcome:
    """mode, and a median that has always a dim: the value along ``dim``, and an index."""
    return _order_statistic(x, dim, keepdim)


@rule("median", params=("input", ("dim", None), ("keepdim", False)))
def median(x: Any, dim: Any = None, keepdim: bool = False) -> Outcome:
    """median, nanmedian: of all, or along ``dim`` with an index."""
    if dim is not None:
        return _order_statistic(x, dim, keepdim)
    whole = lying(x, dims_of(None, len(x.shape)))
    return Outcome((whole,), whole, ())


def _order_statistic(x: Any, dim: int, keepdim: bool) -> Outcome:
    dims = dim_of(dim, len(x.shape))
    lies = lying(x, dims)
    result = result_of(x, lies, dims, checked_keepdim(keepdim))
    return Outcome((lies,), None, outputs=(result, result))
