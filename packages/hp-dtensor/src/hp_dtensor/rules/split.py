"""A tensor taken apart along a dim: split, chunk, unbind and their kin. Linear.

The dim is joined first where it is cut, unless there is one piece only: the chunks of a piece are not those of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor.rules.labels import Labelled, Operand, labelled, numbered
from hp_dtensor.rules.reduction import dims_of
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec


def _dim(dim: Any, x: Spec) -> int:
    if not x.shape:
        raise ValueError("a 0-d tensor cannot be taken apart")
    (at,) = dims_of(dim, len(x.shape))
    return at


def _pieces(x: Spec, sizes: Sequence[int], dim: int) -> Outcome:
    labels = list(numbered("dim", len(x.shape)))
    if len(sizes) > 1:
        labels[dim] = ""
    results = [Labelled(tuple(labels), (*x.shape[:dim], n, *x.shape[dim + 1 :])) for n in sizes]
    found = labelled([Operand(0, x, tuple(labels))], results, is_tuple=True)
    if len(sizes) == 1:
        # What cuts the dim is no longer what the operation sees of it.
        return Outcome(found.inputs, None, outputs=found.outputs, run=lambda local, *_, **__: (local,))
    return found


def _count(n: Any, what: str) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"{what} must be a positive int, got {n!r}")
    return n


def _renamed(*names: str) -> Any:
    """The argument at position 1 has other names, too."""

    def normalise(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = [name for name in names if name in kwargs]
        if not given:
            return args, kwargs
        rest = dict(kwargs)
        value = rest.pop(given[0])
        # bind() has filled the position with its default, where a later argument is named.
        return (args[0], value, *args[2:]), rest

    return normalise


@rule(
    "split",
    params=("tensor", ("split_size_or_sections", None), ("dim", 0)),
    normalise=_renamed("split_size", "split_sizes"),
    views=True,
)
def split(x: Any, size: Any, dim: int = 0) -> Outcome:
    """Pieces of one size (the last one shorter), or of given sizes."""
    at = _dim(dim, x)
    n = x.shape[at]
    if isinstance(size, (tuple, list)):
        return _of_sizes(x, size, at)
    if n == 0 and size == 0:
        return _pieces(x, [0], at)
    size = _count(size, "the size of the pieces")
    return _pieces(x, [min(size, n - i) for i in range(0, n, size)] or [0], at)


def _of_sizes(x: Spec, sizes: Sequence[int], at: int) -> Outcome:
    if (
        any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in sizes)
        or sum(sizes) != x.shape[at]
    ):
        raise ValueError(
            f"sizes {tuple(sizes)} must be whole numbers with the sum {x.shape[at]}, the size of dim {at}"
        )
    return _pieces(x, tuple(sizes), at)


@rule("chunk", params=("input", "chunks", ("dim", 0)), views=True)
def chunk(x: Any, chunks: int, dim: int = 0) -> Outcome:
    """At most ``chunks`` pieces of equal size, the last one shorter."""
    at, chunks = _dim(dim, x), _count(chunks, "the number of chunks")
    n = x.shape[at]
    if n == 0:
        return _pieces(x, [0] * chunks, at)
    size = -(-n // chunks)
    return _pieces(x, [min(size, n - i) for i in range(0, n, size)], at)


@rule("unbind", params=("input", ("dim", 0)), views=True)
def unbind(x: Any, dim: int = 0) -> Outcome:
    """Every slice along a dim, without it."""
    at = _dim(dim, x)
    labels = numbered("dim", len(x.shape))
    rest = (*labels[:at], *labels[at + 1 :])
    results = [Labelled(rest, (*x.shape[:at], *x.shape[at + 1 :]))] * x.shape[at]
    if not results:
        raise ValueError(f"unbind along dim {at} of size 0 gives nothing")
    return labelled([Operand(0, x, (*labels[:at], "", *labels[at + 1 :]))], results, is_tuple=True)


@rule(
    "tensor_split",
    params=("input", ("indices_or_sections", None), ("dim", 0)),
    normalise=_renamed("sections", "indices"),
    views=True,
)
def tensor_split(x: Any, parts: Any, dim: int = 0) -> Outcome:
    """A number of pieces (the first ones longer), or the places of the cuts."""
    return _parts(x, parts, _dim(dim, x))


def _parts(x: Spec, parts: Any, at: int) -> Outcome:
    n = x.shape[at]
    if isinstance(parts, Spec):
        raise ValueError("the places of the cuts must be ints, not a tensor: use tolist()")
    if isinstance(parts, (tuple, list)):
        bounds = [slice(None, i).indices(n)[1] for i in parts]
        sizes = [max(0, b - a) for a, b in zip([0, *bounds], [*bounds, n], strict=True)]
        return _pieces(x, sizes, at)
    parts = _count(parts, "the number of pieces")
    return _pieces(x, [n // parts + (i < n % parts) for i in range(parts)], at)


def _evenly(x: Spec, parts: Any, at: int) -> Outcome:
    if isinstance(parts, int) and parts > 0 and x.shape[at] % parts:
        raise ValueError(f"dim {at} of size {x.shape[at]} does not fall into {parts} equal pieces")
    return _parts(x, parts, at)


@rule(
    "hsplit",
    params=("input", ("indices_or_sections", None)),
    normalise=_renamed("sections", "indices"),
    views=True,
)
def hsplit(x: Any, parts: Any) -> Outcome:
    """Along dim 1; vectors along dim 0."""
    return _evenly(x, parts, _dim(0 if len(x.shape) == 1 else 1, x))


@rule(
    "vsplit",
    params=("input", ("indices_or_sections", None)),
    normalise=_renamed("sections", "indices"),
    views=True,
)
def vsplit(x: Any, parts: Any) -> Outcome:
    """Along dim 0 of a tensor with at least two dims."""
    _needs(x, 2)
    return _evenly(x, parts, 0)


@rule(
    "dsplit",
    params=("input", ("indices_or_sections", None)),
    normalise=_renamed("sections", "indices"),
    views=True,
)
def dsplit(x: Any, parts: Any) -> Outcome:
    """Along dim 2."""
    _needs(x, 3)
    return _evenly(x, parts, 2)


def _needs(x: Spec, ndim: int) -> None:
    if len(x.shape) < ndim:
        raise ValueError(f"needs a tensor with at least {ndim} dims, got shape {x.shape}")
