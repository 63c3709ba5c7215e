"""Operations along a dim that every rank needs whole: cumulative ones, sorting, order statistics.

A cut of that dim is joined first; cuts of the other dims stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.rules.along import SUMS, checked_keepdim, dim_of, dims_of, lying, result_of
from hp_dtensor.rules.registry import Outcome, Result, rule

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@rule("cumsum", params=("input", "dim"))
def cumsum(x: Any, dim: Any, *rest: Any, **kwargs: Any) -> Outcome:
    """Sums of all before and itself: linear, but for a dtype that is asked for."""
    is_linear = all(option is None for option in (*rest, *kwargs.values()))
    lies = lying(x, dim_of(dim, len(x.shape)), SUMS if is_linear else ())
    return Outcome((lies,), lies, x.shape)


@rule("cumulative", params=("input", "dim"))
def cumulative(x: Any, dim: Any, *rest: Any, **kwargs: Any) -> Outcome:
    """cumprod, logcumsumexp."""
    lies = lying(x, dim_of(dim, len(x.shape)))
    return Outcome((lies,), lies, x.shape)


@rule("cumulative_extreme", params=("input", "dim"))
def cumulative_extreme(x: Any, dim: Any) -> Outcome:
    """cummax, cummin: values and indices."""
    lies = lying(x, dim_of(dim, len(x.shape)))
    result = Result(lies, x.shape)
    return Outcome((lies,), None, outputs=(result, result))


@rule("topk", params=("input", "k", ("dim", -1), ("largest", True), ("sorted", True)))
def topk(x: Any, k: int, dim: int = -1, *order: Any) -> Outcome:
    """The ``k`` largest or smallest along ``dim``: values and indices."""
    dims = dim_of(dim, len(x.shape))
    if isinstance(k, bool) or not isinstance(k, int):
        raise ValueError(f"k must be an int, got {k!r}")
    if dims and not 0 <= k <= x.shape[dims[0]]:
        raise ValueError(f"k = {k} of a dim of size {x.shape[dims[0]]}: there are not so many")
    lies = lying(x, dims)
    result = Result(lies, tuple(k if i in dims else n for i, n in enumerate(x.shape)))
    return Outcome((lies,), None, outputs=(result, result))


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
