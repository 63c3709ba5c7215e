"""Einsum of MindSpore, which has no kernel on cpu: each operand by the next one, as a product of batches of matrices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

from mindspore import Tensor, mint, ops

from hp_dtensor.rules.einsum import labels_of_operands, output_labels
from hp_platform import get_platform

Labels = tuple[str, ...]


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """``einsum("...ij,jk->...ik", a, b)``: any number of operands, from left to right."""
    named = labels_of_operands(equation, [x.ndim for x in operands])
    output = output_labels(equation, named)
    sizes: dict[str, int] = {}
    for labels, x in zip(named, operands, strict=True):
        for label, n in zip(labels, x.shape, strict=True):
            sizes[label] = n if sizes.get(label, 1) == 1 else sizes[label]
    terms = [_of_single_labels(x, labels, sizes) for x, labels in zip(operands, named, strict=True)]
    y, own = terms[0]
    for i, (x, labels) in enumerate(terms[1:], 2):
        later = {*output, *(label for _, others in terms[i:] for label in others)}
        y, own = _product(y, own, x, labels, later)
    y, own = _summed(y, own, output)
    return _ordered(y, own, output)


def _of_single_labels(x: Tensor, labels: Labels, sizes: dict[str, int]) -> tuple[Tensor, Labels]:
    """The diagonals of labels that come twice, and dims of size 1 stretched to what others have."""
    x = mint.broadcast_to(x, tuple(sizes[label] for label in labels))
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            left = [d for d in range(len(labels)) if d not in (first, second)]
            # The elements (i, i) of the two dims as one are every (n + 1)th.
            n = sizes[label]
            order = (*left, first, second)
            flat = mint.permute(x, order).reshape((*(x.shape[d] for d in left), n * n))
            places = get_platform().arange(0, n) * (n + 1)
            x = ops.gather(flat, places, len(left))
            labels = (*(labels[d] for d in left), label)
    return x, labels


def _summed(x: Tensor, labels: Labels, kept: Collection[str]) -> tuple[Tensor, Labels]:
    dims = tuple(d for d, label in enumerate(labels) if label not in kept)
    if not dims:
        return x, labels
    return get_platform().sum(x, dims), tuple(label for label in labels if label in kept)


def _product(
    x: Tensor, of_x: Labels, y: Tensor, of_y: Labels, later: Collection[str]
) -> tuple[Tensor, Labels]:
    """Of two, summed over the labels that neither the output nor a later operand has."""
    x, of_x = _summed(x, of_x, {*of_y, *later})
    y, of_y = _summed(y, of_y, {*of_x, *later})
    batch = [label for label in of_x if label in of_y and label in later]
    inner = [label for label in of_x if label in of_y and label not in later]
    rows = [label for label in of_x if label not in of_y]
    columns = [label for label in of_y if label not in of_x]
    sizes = {**dict(zip(of_x, x.shape, strict=True)), **dict(zip(of_y, y.shape, strict=True))}

    def count(labels: Sequence[str]) -> int:
        return prod(sizes[label] for label in labels)

    left = _ordered(x, of_x, (*batch, *rows, *inner)).reshape((count(batch), count(rows), count(inner)))
    right = _ordered(y, of_y, (*batch, *inner, *columns)).reshape(
        (count(batch), count(inner), count(columns))
    )
    made = (*batch, *rows, *columns)
    return get_platform().matmul(left, right).reshape(tuple(sizes[label] for label in made)), made


def _ordered(x: Tensor, labels: Labels, wanted: Sequence[str]) -> Tensor:
    order = tuple(labels.index(label) for label in wanted)
    return x if order == tuple(range(len(order))) else mint.permute(x, order)
