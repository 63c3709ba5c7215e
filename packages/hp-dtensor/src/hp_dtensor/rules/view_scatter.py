"""Copies of a tensor with a part of it written anew: what views would do in place. And memory read by strides.

The dims that a part is taken of are joined on both tensors; they stay cut alike along all others. Linear in both at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from hp_dtensor.placements import Shard
from hp_dtensor.rules.along import one_dim
from hp_dtensor.rules.along_whole import diagonal_block
from hp_dtensor.rules.labels import Labelled, Operand, Role, labelled
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec
from hp_platform import get_platform

Tensor = Any


def _written(
    x: Spec, src: Spec, whole: Collection[int], wanted: tuple[int, ...], of_src: tuple[str, ...]
) -> Outcome:
    if src.shape != wanted:
        raise ValueError(f"src must have the shape {wanted} of the part that it replaces, got {src.shape}")
    labels = tuple("" if i in whole else f"dim {i}" for i in range(len(x.shape)))
    operands = [Operand(0, x, labels, Role.SUMMAND), Operand(1, src, of_src, Role.FACTOR)]
    return labelled(operands, [Labelled(labels, x.shape)])


def _check(name: str, x: Any, src: Any) -> None:
    if not (isinstance(x, Spec) and isinstance(src, Spec) and x.shape):
        raise ValueError(f"{name} takes two tensors, the first with at least one dim; got {x} and {src}")


@rule("select_scatter", params=("input", "src", "dim", "index"))
def select_scatter(x: Any, src: Any, dim: int, index: int) -> Outcome:
    """``y = x.clone(); y.select(dim, index).copy_(src)``."""
    _check("select_scatter", x, src)
    at = one_dim(dim, len(x.shape))
    if not -x.shape[at] <= index < x.shape[at]:
        raise ValueError(f"index {index} is out of range for dim {dim} of size {x.shape[at]}")
    rest = [i for i in range(len(x.shape)) if i != at]
    return _written(x, src, {at}, tuple(x.shape[i] for i in rest), tuple(f"dim {i}" for i in rest))


@rule("slice_scatter", params=("input", "src", ("dim", 0), ("start", None), ("end", None), ("step", 1)))
def slice_scatter(
    x: Any, src: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Outcome:
    """``y = x.clone(); y[start:end:step].copy_(src)``, of dim ``dim``."""
    _check("slice_scatter", x, src)
    at = one_dim(dim, len(x.shape))
    if step < 1:
        raise ValueError(f"step must be above 0, got {step}")
    count = len(range(*slice(start, end, step).indices(x.shape[at])))
    parts = {at}
    if step == 1 and count == x.shape[at]:  # all of it, of every piece
        parts, start, end = set(), None, None
    names = tuple("" if i in parts else f"dim {i}" for i in range(len(x.shape)))
    found = _written(x, src, parts, (*x.shape[:at], count, *x.shape[at + 1 :]), names)
    # Placed by position, since one rank's arguments are those of the whole.
    return replace(found, around=lambda function: lambda y, part, *_: function(y, part, at, start, end, step))


@rule("diagonal_scatter", params=("input", "src", ("offset", 0), ("dim1", 0), ("dim2", 1)))
def diagonal_scatter(x: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Outcome:
    """``y = x.clone(); y.diagonal(offset, dim1, dim2).copy_(src)``."""
    _check("diagonal_scatter", x, src)
    a, b = (one_dim(dim, len(x.shape)) for dim in (dim1, dim2))
    if a == b:
        raise ValueError(f"a diagonal needs two different dims, got {dim1} and {dim2} of shape {x.shape}")
    rows, columns = x.shape[a], x.shape[b]
    count = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    rest = [i for i in range(len(x.shape)) if i not in (a, b)]
    wanted = (*(x.shape[i] for i in rest), count)
    return _written(x, src, {a, b}, wanted, (*(f"dim {i}" for i in rest), ""))


@rule("fill_diagonal_", params=("input", "fill_value", ("wrap", False)), in_place=True)
def fill_diagonal_(x: Any, value: Any, wrap: bool = False) -> Outcome:
    """The main diagonal of a matrix becomes ``value``; every rank writes what it has of it."""
    if any(p.is_partial() for p in x.placements):
        raise ValueError(f"fill_diagonal_ cannot write into a sum, got {x}: call reduce_partial() first")
    is_cut = any(isinstance(p, Shard) for p in x.placements)
    if is_cut and (len(x.shape) != 2 or (wrap and x.shape[0] > x.shape[1])):
        raise ValueError(
            f"fill_diagonal_ of a cut tensor takes a matrix, and no wrap, got {x}: redistribute it to Replicate() first"
        )
    if not is_cut:
        return Outcome((x.placements,), x.placements, x.shape)
    row, column, count = diagonal_block(x, x.placements)

    def around(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(local: Tensor, *_: Any) -> Tensor:
            if count:
                platform = get_platform()
                kernel(platform.narrow(platform.narrow(local, 0, row, count), 1, column, count), value)
            return local

        return run

    return Outcome((x.placements,), x.placements, x.shape, around=around)


@rule("as_strided", params=("input", "size", "stride", ("storage_offset", None)), views=True)
def as_strided(x: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Outcome:
    """Memory read by strides, of a tensor that every rank has whole. ValueError for others, whose memory is in pieces."""
    if any(not p.is_replicate() for p in x.placements):
        raise ValueError(
            f"as_strided reads the memory of the whole, of which each rank has a piece, got {x}: use view, narrow, unfold, "
            f"expand or a subscript, which say what is read; or redistribute it to Replicate() and read that memory"
        )
    return Outcome((x.placements,), x.placements, tuple(size))
