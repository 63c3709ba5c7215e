"""Dims and placements of operations that work along dims: what must lie whole, what is dropped, what stays cut."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.placements import REPLICATE, Partial, Placement, Shard
from hp_dtensor.rules.registry import Placements, Result
from hp_dtensor.spec import Spec
from hp_platform import get_platform

SUMS = ("sum", "avg")
"""The kinds of Partial that linear operations carry."""


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


def dim_of(dim: Any, ndim: int) -> tuple[int, ...]:
    """One dim, not negative; none of a scalar. ValueError if it is missing or no int."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise ValueError(f"dim must be an int, got {dim!r}")
    return dims_of(dim, ndim)


def one_dim(dim: Any, ndim: int) -> int:
    """One dim, not negative. ValueError if it is missing, or if there is none."""
    if not ndim:
        raise ValueError(f"dim {dim!r} of a tensor without dims: give it one with unsqueeze(0)")
    (found,) = dims_of(dim, ndim)
    return found


def one_place(dim: Any, ndim: int) -> int:
    """The same of an operation to which a tensor without dims is a vector of one element."""
    (found,) = dims_of(dim, max(ndim, 1))
    return found


def keeps_sums(options: Sequence[Any]) -> bool:
    """Whether an operation stays linear with these options: none is given, or a dtype that truncates no summand."""
    a_dtype = type(get_platform().dtype("float32"))

    def truncates(option: Any) -> bool:
        return not (isinstance(option, a_dtype) and has_fractions(option))

    return not any(truncates(option) for option in options if option is not None and option is not False)


def has_fractions(dtype: Any) -> bool:
    """Whether it is a dtype of floating or complex numbers: a cast to it is linear."""
    platform = get_platform()
    return bool(platform.is_floating(dtype) or platform.dtype_name(dtype).startswith("complex"))


def lying(spec: Spec, whole: Collection[int] = (), carried: Collection[str] = ()) -> Placements:
    """How a tensor must lie so that the dims ``whole`` are not cut, with the kinds ``carried`` of Partial only."""

    def stays(placement: Placement) -> bool:
        if isinstance(placement, Partial):
            return placement.reduce_op in carried
        return isinstance(placement, Shard) and placement.dim not in whole

    return tuple(p if stays(p) else REPLICATE for p in spec.placements)


def dropped(placements: Placements, dims: Collection[int], keepdim: bool) -> Placements:
    """The placements, none of which cuts one of ``dims``, when these dims are gone, or have size 1."""

    def moved(placement: Placement) -> Placement:
        if keepdim or not isinstance(placement, Shard):
            return placement
        return replace(placement, dim=placement.dim - sum(d < placement.dim for d in dims))

    return tuple(map(moved, placements))


def shape_without(shape: Sequence[int], dims: Collection[int], keepdim: bool) -> tuple[int, ...]:
    """The shape when these dims are reduced."""
    return tuple(1 if i in dims else n for i, n in enumerate(shape) if keepdim or i not in dims)


def result_of(spec: Spec, placements: Placements, dims: Collection[int], keepdim: bool) -> Result:
    """Of a reduction over ``dims`` of a tensor that lies whole along them."""
    return Result(dropped(placements, dims, keepdim), shape_without(spec.shape, dims, keepdim))


def checked_keepdim(keepdim: Any) -> bool:
    """ValueError unless it is True or False: a dim in its place would be taken for one."""
    if not isinstance(keepdim, bool):
        raise ValueError(f"keepdim must be True or False, got {keepdim!r}")
    return keepdim
