"""Searches, counts and tables: which elements, how many, how often.

How many elements a mask takes, or how many different ones there are, only the values say: there everything is joined first, so
that all ranks agree, and the results are Replicate.
"""

from __future__ import annotations

from typing import Any

from hp_dtensor.rules.elementwise import broadcast_shape
from hp_dtensor.rules.labels import Labelled, Operand, Role, labelled, numbered
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec


@rule("masked_select", params=("input", "mask"))
def masked_select(x: Any, mask: Any) -> Outcome:
    """The elements for which a mask is true, as a vector."""
    if not isinstance(mask, Spec):
        raise ValueError("masked_select needs a tensor for its mask")
    broadcast_shape([x.shape, mask.shape])
    return Outcome.of_values(x, mask)


@rule("nonzero", params=("input",))
def nonzero(x: Any, **kwargs: Any) -> Outcome:
    """nonzero, argwhere: the places of all elements but zeros, one per row; with ``as_tuple`` one vector per dim."""
    return Outcome.of_values(x)


@rule("unique", params=("input",))
def unique(x: Any, *options: Any, **kwargs: Any) -> Outcome:
    """unique, unique_consecutive: the different elements, also their places and how often they occur."""
    return Outcome.of_values(x)


@rule("bincount", params=("input", ("weights", None), ("minlength", 0)))
def bincount(x: Any, weights: Any = None, minlength: int = 0) -> Outcome:
    """How often each number occurs. The largest one says how long the result is."""
    return Outcome.of_values(x) if weights is None else Outcome.of_values(x, weights)


@rule("histc", params=("input", ("bins", 100), ("min", 0), ("max", 0)))
def histc(x: Any, bins: int = 100, low: Any = 0, high: Any = 0) -> Outcome:
    """How many elements lie in each of equal bins. Of a cut tensor every rank counts its own, if the bounds are given."""
    labels = numbered("dim", len(x.shape)) if low != high else ("",) * len(x.shape)
    return labelled([Operand(0, x, labels, Role.PLAIN)], [Labelled(("",), (bins,))])


@rule("one_hot", params=("input", ("num_classes", -1)))
def one_hot(x: Any, num_classes: int = -1) -> Outcome:
    """A new last dim with a 1 at each number. Without ``num_classes`` the largest number says how long it is."""
    if num_classes == -1:
        return Outcome.of_values(x)
    if num_classes < 1:
        raise ValueError(
            f"num_classes must be positive, or -1 for one more than the largest number, got {num_classes}"
        )
    labels = numbered("dim", len(x.shape))
    return labelled([Operand(0, x, labels, Role.PLAIN)], [Labelled((*labels, ""), (*x.shape, num_classes))])


@rule("isin", params=("elements", "test_elements"))
def isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Outcome:
    """For each element whether it is among others, which every rank needs all of."""
    operands = []
    shape: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    if isinstance(elements, Spec):
        shape, labels = elements.shape, numbered("dim", len(elements.shape))
        operands.append(Operand(0, elements, labels, Role.PLAIN))
    if isinstance(test_elements, Spec):
        operands.append(Operand(1, test_elements, ("",) * len(test_elements.shape), Role.PLAIN))
    return labelled(operands, [Labelled(labels, shape)])


@rule("searchsorted", params=("sorted_sequence", "input"))
def searchsorted(boundaries: Any, x: Any, **kwargs: Any) -> Outcome:
    """Where each value would go in a sorted vector, or row by row in sorted rows. The vector is joined."""
    return _sorted_into(boundaries, x, 0, kwargs.get("sorter"))


@rule("bucketize", params=("input", "boundaries"))
def bucketize(x: Any, boundaries: Any, **kwargs: Any) -> Outcome:
    """searchsorted with the values first."""
    return _sorted_into(boundaries, x, 1, None)


def _sorted_into(boundaries: Any, x: Any, position: int, sorter: Any) -> Outcome:
    if not isinstance(boundaries, Spec) or not boundaries.shape:
        raise ValueError("the boundaries must be a tensor of at least one dim")
    if sorter is not None:
        raise ValueError("sorter is not taken: give the boundaries sorted")
    rows = boundaries.shape[:-1]
    shape = x.shape if isinstance(x, Spec) else ()
    if rows and rows != shape[:-1]:
        raise ValueError(
            f"rows of boundaries {boundaries.shape} need as many rows of values, got shape {shape}"
        )
    labels = numbered("dim", len(shape))
    operands = [Operand(position, boundaries, (*labels[: len(rows)], ""), Role.PLAIN)]
    if isinstance(x, Spec):
        operands.insert(0 if position else 1, Operand(1 - position, x, labels, Role.PLAIN))
    return labelled(operands, [Labelled(labels, shape)])
