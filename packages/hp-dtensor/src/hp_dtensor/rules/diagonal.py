"""Triangles and diagonals of matrices. Linear.

A triangle keeps any cut: a piece of a matrix has its diagonal somewhere else, by as much as its rows and columns begin later.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hp_dtensor.rules.along import one_dim
from hp_dtensor.rules.labels import Labelled, Operand, labelled
from hp_dtensor.rules.rearrange import along
from hp_dtensor.rules.registry import EVERY_KIND, Outcome, rule
from hp_dtensor.spec import local_block


def _named_diagonal(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # The place of the diagonal is always given, because a piece has it elsewhere.
    return (args if len(args) > 1 else (*args, 0)), kwargs


@rule("triangle", params=("input", ("diagonal", 0)), normalise=_named_diagonal, carries=EVERY_KIND)
def triangle(x: Any, diagonal: int = 0) -> Outcome:
    """tril and triu: zeros above or below a diagonal of the last two dims."""
    if len(x.shape) < 2:
        raise ValueError(f"needs a matrix, got shape {x.shape}")
    found = along(x, (), x.shape)
    _, offset = local_block(x.shape, found.inputs[0], x.mesh.shape, x.mesh.get_coordinate())
    shift = offset[-2] - offset[-1]
    return replace(found, replaced={1: diagonal + shift})


@rule("diagonal", params=("input", ("offset", 0), ("dim1", 0), ("dim2", 1)), views=True)
def diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Outcome:
    """A diagonal of two dims, which becomes the last dim. Both are joined first."""
    a, b = (one_dim(dim, len(x.shape)) for dim in (dim1, dim2))
    if a == b or len(x.shape) < 2:
        raise ValueError(f"a diagonal needs two different dims, got {dim1} and {dim2} of shape {x.shape}")
    length = _length(x.shape[a], x.shape[b], offset)
    labels = tuple("" if i in (a, b) else f"dim {i}" for i in range(len(x.shape)))
    rest = [i for i in range(len(x.shape)) if i not in (a, b)]
    result = Labelled((*(labels[i] for i in rest), ""), (*(x.shape[i] for i in rest), length))
    return labelled([Operand(0, x, labels)], [result])


@rule("matrix_diagonal", params=("A",), views=True)
def matrix_diagonal(x: Any, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Outcome:
    """linalg.diagonal: of the last two dims, if no others are named. Its options have no positions."""
    return diagonal(x, offset, dim1, dim2)


def _length(rows: int, columns: int, offset: int) -> int:
    return max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))


@rule("diag_embed", params=("input", ("offset", 0), ("dim1", -2), ("dim2", -1)), carries=EVERY_KIND)
def diag_embed(x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Outcome:
    """The last dim becomes a diagonal of two new dims."""
    ndim = len(x.shape) + 1
    a, b = (one_dim(dim, ndim) for dim in (dim1, dim2))
    if a == b or not x.shape:
        raise ValueError(f"a diagonal needs two different dims, got {dim1} and {dim2}")
    labels = (*(f"dim {i}" for i in range(len(x.shape) - 1)), "")
    size = x.shape[-1] + abs(offset)
    rest = iter(zip(labels, x.shape, strict=True))
    pairs = [("", size) if i in (a, b) else next(rest) for i in range(ndim)]
    result = Labelled(tuple(label for label, _ in pairs), tuple(n for _, n in pairs))
    return labelled([Operand(0, x, labels)], [result])


@rule("diag", params=("input", ("diagonal", 0)), carries=EVERY_KIND)
def diag(x: Any, diagonal_: int = 0) -> Outcome:
    """Of a matrix its diagonal, of a vector the matrix with this diagonal."""
    if len(x.shape) not in (1, 2):
        raise ValueError(
            f"diag needs a vector or a matrix, got shape {x.shape}: use diagonal() or diag_embed()"
        )
    return diag_embed(x, diagonal_) if len(x.shape) == 1 else diagonal(x, diagonal_)


@rule("diagflat", params=("input", ("offset", 0)), carries=EVERY_KIND)
def diagflat(x: Any, offset: int = 0) -> Outcome:
    """The matrix with all elements on a diagonal."""
    count = 1
    for n in x.shape:
        count = count * n
    size = count + abs(offset)
    whole = Operand(0, x, ("",) * len(x.shape))
    return labelled([whole], [Labelled(("", ""), (size, size))])
