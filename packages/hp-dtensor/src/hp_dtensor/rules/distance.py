"""Distances of vectors: of pairs, of all pairs, of two whole tensors.

Every rank has whole vectors, but where their elements are only added up (p = 1): then the distances are summands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hp_dtensor import across
from hp_dtensor.placements import PARTIAL, REPLICATE, Shard
from hp_dtensor.rules.along import checked_keepdim
from hp_dtensor.rules.elementwise import broadcast_shape, pointwise
from hp_dtensor.rules.labels import Labelled, Operand, Role, aligned, labelled, numbered
from hp_dtensor.rules.norm import vector_norm
from hp_dtensor.rules.registry import Outcome, Placements, rule
from hp_dtensor.spec import Spec, make_spec
from hp_platform import get_platform

Tensor = Any


def _check(name: str, x: Any, y: Any, at_least: int = 1) -> None:
    if not all(isinstance(t, Spec) and len(t.shape) >= at_least for t in (x, y)):
        raise ValueError(f"{name} takes two tensors with at least {at_least} dims, got {x} and {y}")


@rule("pairwise_distance", params=("x1", "x2", ("p", 2.0), ("eps", 1e-6), ("keepdim", False)))
def pairwise_distance(x: Any, y: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Outcome:
    """``norm(x1 - x2 + eps, p)`` along the last dim, with broadcasting."""
    _check("pairwise_distance", x, y)
    shape = broadcast_shape((x.shape, y.shape))
    both = pointwise((x, y))
    output = both.output
    assert output is not None
    last = Shard(len(shape) - 1)
    size = (*shape[:-1], 1) if checked_keepdim(keepdim) else shape[:-1]
    if p == 1:
        return Outcome(both.inputs, tuple(PARTIAL if out == last else out for out in output), size)

    def whole_vectors(lies: Placements) -> Placements:
        return tuple(REPLICATE if out == last else own for own, out in zip(lies, output, strict=True))

    return Outcome(tuple(map(whole_vectors, both.inputs)), whole_vectors(output), size)


_BY_PRODUCTS_ABOVE = 25
"""From so many vectors on a side torch takes distances by a product of matrices, whose rounding is another."""


@rule("cdist", params=("x1", "x2", ("p", 2.0), ("compute_mode", "use_mm_for_euclid_dist_if_necessary")))
def cdist(
    x: Any, y: Any, p: float = 2.0, compute_mode: Any = "use_mm_for_euclid_dist_if_necessary"
) -> Outcome:
    """Distances of all rows of ``x1 (..., n, d)`` to all of ``x2 (..., m, d)``. Both kinds of rows may be cut, and batches."""
    _check("cdist", x, y, 2)
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(f"cdist of vectors of lengths {x.shape[-1]} and {y.shape[-1]}: they must be equal")
    batch = broadcast_shape((x.shape[:-2], y.shape[:-2])) if len(x.shape) + len(y.shape) > 4 else ()
    labels = numbered("batch", len(batch))
    operands = [
        Operand(i, t, (*aligned(t.shape[:-2], batch, labels), name, "element" if p == 1 else ""), Role.PLAIN)
        for i, (t, name) in enumerate(((x, "row"), (y, "column")))
    ]
    result = Labelled((*labels, "row", "column"), (*batch, x.shape[-2], y.shape[-2]))
    found = labelled(operands, [result])
    # The whole decides which way is taken, not this rank's rows. C++ takes numbers, Python names.
    by_products = max(x.shape[-2], y.shape[-2]) > _BY_PRODUCTS_ABOVE
    mode = compute_mode
    if compute_mode in (None, 0):
        mode = 1 if by_products else 2
    elif compute_mode == "use_mm_for_euclid_dist_if_necessary":
        mode = "use_mm_for_euclid_dist" if by_products else "donot_use_mm_for_euclid_dist"

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda a, b, *_: function(a, b, p, mode)

    return Outcome(found.inputs, found.output, found.shape, around=around)


@rule("pdist", params=("input", ("p", 2.0)))
def pdist(x: Any, p: float = 2.0) -> Outcome:
    """Distances of all pairs of rows of a matrix, in one vector: every rank has all rows and all distances."""
    if len(x.shape) != 2:
        raise ValueError(f"pdist takes a matrix, got shape {x.shape}")
    whole = (REPLICATE,) * len(x.placements)
    return Outcome((whole,), whole, (math.comb(x.shape[0], 2),))


@rule("dist", params=("input", "other", ("p", 2.0)))
def dist(x: Any, y: Any, p: float = 2.0) -> Outcome:
    """The norm of ``input - other``, with broadcasting: as :func:`vector_norm` over all dims."""
    _check("dist", x, y, 0)
    if isinstance(p, bool) or not isinstance(p, (int, float)):
        raise ValueError(f"p of a distance is a number, got {p!r}")
    both = pointwise((x, y))
    assert both.output is not None
    difference = make_spec(x.mesh, both.output, both.shape)

    norm = vector_norm(difference, float(p))
    inner = norm.around
    assert inner is not None

    # What lies whole beside a cut one is used differently by each rank; the caller knows where the result is a summand.
    used = [
        [i for i, (own, out, left) in enumerate(zip(lies, both.output, norm.output or (), strict=True))
         if own.is_replicate() and out.is_shard() and left.is_replicate() and x.mesh.shape[i] > 1]
        for lies in both.inputs
    ]  # fmt: skip

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        run = inner(lambda y, order, *_: function(y, get_platform().zeros_like(y), order))

        def of_difference(a: Tensor, b: Tensor, *_: Any) -> Tensor:
            a, b = (across.used_differently(y, x, dims) for y, dims in zip((a, b), used, strict=True))
            return run(a - b, p)

        return of_difference

    return Outcome(both.inputs, norm.output, (), around=around)
