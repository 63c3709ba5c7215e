"""The arithmetic of meshes, without processes, groups or frameworks.

A root mesh is a flat tuple of global ranks; the place of a rank in it is its *position*. Every mesh that is cut out of a
root (a slice, a flattened or split dim) is described over these positions by ``dims`` and ``base``: each dim is a tuple of
:class:`Factor`, outermost first, a factor is ``size`` steps of ``stride`` positions, and the mesh holds the positions
``base + sum(step * stride)``. For a root of shape (dp=2, pp=3, tp=4) the strides are 12, 4 and 1, and dp and tp flattened
to one dim are the factors (2 steps of 12) and (4 steps of 1): no stride of one number could say that.

The same idea stands in CuTe's layouts (https://docs.nvidia.com/cutlass/media/docs/cpp/cute/01_layout.html). A factor
remembers the root dim that it is part of, so that overlap and order do not depend on sizes: with sizes and strides alone,
dims of size 1 could not be told apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple


class Factor(NamedTuple):
    """A root dim, or the part of it that splitting gave."""

    root_dim: int
    path: tuple[int, ...]
    """Which part: () is the whole root dim, (1,) its second part, (1, 0) the first part of that."""
    size: int
    stride: int
    """In positions of the root; 0 for a virtual dim, whose slices all live on one rank."""


Dim = tuple[Factor, ...]
"""A mesh dim: its factors, outermost first; its size is the product of theirs."""

Dims = tuple[Dim, ...]


def row_major(shape: Sequence[int], *, virtual_last: bool = False) -> Dims:
    """The dims of a root of this shape: the last dim runs fastest. A virtual last dim takes no ranks of its own."""
    dims: list[Dim] = []
    stride = 1
    for index in reversed(range(len(shape))):
        if virtual_last and index == len(shape) - 1:
            dims.append((Factor(index, (), shape[index], 0),))
            continue
        dims.append((Factor(index, (), shape[index], stride),))
        stride = stride * shape[index]
    return tuple(reversed(dims))


def size_of(dim: Dim) -> int:
    """Number of coordinates along a dim."""
    return math.prod(factor.size for factor in dim)


def shape_of(dims: Dims) -> tuple[int, ...]:
    """Sizes of all dims."""
    return tuple(size_of(dim) for dim in dims)


def is_virtual(dim: Dim) -> bool:
    """Whether all slices along this dim live on one rank."""
    return any(factor.stride == 0 for factor in dim)


def flat(dims: Dims) -> Dim:
    """All dims as one, the first outermost."""
    return tuple(itertools.chain.from_iterable(dims))


def offsets(dim: Dim) -> tuple[int, ...]:
    """Positions along a dim, counted from its first; a virtual factor adds none."""
    steps = [range(0, factor.size * factor.stride, factor.stride) for factor in dim if factor.stride > 0]
    return tuple(sum(taken) for taken in itertools.product(*steps))


def positions(dims: Dims, base: int) -> tuple[int, ...]:
    """All positions of a mesh in row-major order, each once."""
    return tuple(base + offset for offset in offsets(flat(dims)))


def coordinate(dims: Dims, base: int, position: int) -> tuple[int, ...] | None:
    """The coordinate of a position along every dim; None if the mesh does not hold it. 0 along virtual dims."""
    if base_of(dims, position) != base:
        return None
    found: list[int] = []
    for dim in dims:
        along = 0
        for factor in dim:
            along = along * factor.size + _step(factor, position)
        found.append(along)
    return tuple(found)


def base_of(dims: Dims, position: int) -> int:
    """The first position of the one mesh with these dims that holds ``position``."""
    return position - sum(_step(factor, position) * factor.stride for factor in flat(dims))


def _step(factor: Factor, position: int) -> int:
    return 0 if factor.stride == 0 else position // factor.stride % factor.size


def lines(dims: Dims, base: int, index: int) -> tuple[tuple[int, ...], ...]:
    """All lines of positions along dim ``index``, in row-major order of the other coordinates.

    Along a virtual dim every line is one position.
    """
    others = offsets(flat(dims[:index] + dims[index + 1 :]))
    along = offsets(dims[index])
    return tuple(tuple(base + start + step for step in along) for start in others)


def line_through(dims: Dims, index: int, position: int) -> tuple[int, ...]:
    """The positions along dim ``index`` that share all other coordinates with ``position``."""
    start = base_of((dims[index],), position)
    return tuple(start + step for step in offsets(dims[index]))


def merges(dim: Dim) -> bool:
    """Whether equal steps lead from each position of the dim to the next, as in an unflattened dim."""
    parts = [factor for factor in dim if factor.size > 1]
    return all(outer.stride == inner.size * inner.stride for outer, inner in itertools.pairwise(parts))


def order_key(dim: Dim) -> tuple[int, int, tuple[int, ...]]:
    """Sorts dims as the root has them: by the outermost root dim, then from outer to inner parts of it."""
    first = dim[0]
    return first.root_dim, -first.stride, first.path


def overlap(a: Dim, b: Dim) -> bool:
    """Whether two dims share (a part of) a root dim, so that they cannot be dims of one mesh."""
    return any(_factors_overlap(x, y) for x in a for y in b if x.root_dim == y.root_dim)


def _factors_overlap(x: Factor, y: Factor) -> bool:
    shorter = min(len(x.path), len(y.path))
    one_holds_the_other = x.path[:shorter] == y.path[:shorter]
    # Parts of two different splittings of one root dim: their ranges of strides may still cross.
    ranges_cross = x.size > 1 and y.size > 1 and x.stride < y.stride * y.size and y.stride < x.stride * x.size
    return one_holds_the_other or ranges_cross


def split(dim: Dim, sizes: Sequence[int]) -> Dims | None:
    """The dim as several, outermost first; ``sizes`` multiply to its size.

    None if the sizes cut across the factors: (2, 3) flattened is no (3, 2) of whole parts of root dims.
    """
    # Factors of size 1 say nothing about positions: they stay with the first new dim.
    spans = tuple(factor for factor in dim if factor.size > 1) or dim[:1]
    units = tuple(factor for factor in dim if factor not in spans)
    cuts = _cut([factor.size for factor in spans], sizes)
    if cuts is None:
        return None
    new: list[list[Factor]] = [[] for _ in sizes]
    for factor, pieces in zip(spans, cuts, strict=True):
        stride = factor.stride * factor.size
        for part, (owner, size) in enumerate(pieces):
            stride = stride // size
            path = factor.path if len(pieces) == 1 else (*factor.path, part)
            new[owner].append(Factor(factor.root_dim, path, size, stride))
    return tuple(tuple(factors) + (units if index == 0 else ()) for index, factors in enumerate(new))


def _cut(spans: Sequence[int], sizes: Sequence[int]) -> list[list[tuple[int, int]]] | None:
    """For each span its pieces, outermost first, as (index of the size they serve, piece)."""
    cuts: list[list[tuple[int, int]]] = [[] for _ in spans]
    at, left = 0, spans[0]
    for owner, size in enumerate(sizes):
        need = size
        while True:
            if left == 1 and need > 1:
                at = at + 1
                left = spans[at]
            piece = math.gcd(left, need)
            if piece not in (left, need):
                return None
            cuts[at].append((owner, piece))
            need, left = need // piece, left // piece
            if need == 1:
                break
    return cuts


def block_holding(rank: int, num_ranks: int) -> tuple[int, ...]:
    """The contiguous block of ``num_ranks`` global ranks that holds ``rank``, if blocks tile the world from rank 0."""
    start = rank - rank % num_ranks
    return tuple(range(start, start + num_ranks))
