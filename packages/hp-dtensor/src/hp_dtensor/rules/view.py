"""Operations that change the shape and move no value: view and its kin, permutations, expand. All are linear.

They run as a reshape of the local tensor to its new local shape where the elements keep their order, so that one rule
serves view, reshape, flatten, unflatten, squeeze and unsqueeze.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from hp_dtensor.placements import REPLICATE, Placement, Shard
from hp_dtensor.rules.along import dims_of, one_dim, one_place
from hp_dtensor.rules.registry import Outcome, Placements, rule
from hp_dtensor.spec import Spec, local_block
from hp_platform import get_platform

Shape = tuple[int, ...]


# ------------------------------------------------------------------------------------------- elements keep their order
def reshaped(spec: Spec, shape: Shape) -> Outcome:
    """Any view. A cut survives if every rank's block is a block of the chunk rule of a dim of the new shape too.

    Where it is not, the dim is joined first: cutting the result otherwise would hand ranks other elements than theirs.
    """
    targets = {source: group for group in _groups(spec.shape, shape) for source in group[0]}
    kept: list[Placement] = []
    output: list[Placement] = []
    for placement in spec.placements:
        new = placement
        if isinstance(placement, Shard):
            new = _survivor(spec, placement, targets.get(placement.dim), tuple(kept), tuple(output), shape)
        kept.append(REPLICATE if new.is_replicate() else placement)
        output.append(new)
    return _as_reshape(spec, tuple(kept), tuple(output), shape)


def _as_reshape(spec: Spec, kept: Placements, output: Placements, shape: Shape) -> Outcome:
    local_shape, _ = local_block(shape, output, spec.mesh.shape, spec.mesh.get_coordinate())
    return Outcome(
        (kept,), output, shape, run=lambda local, *_, **__: get_platform().reshape(local, local_shape)
    )


def _groups(source: Shape, target: Shape) -> list[tuple[list[int], list[int]]]:
    """Runs of dims of both shapes with equal products, as short as possible."""
    if 0 in source or 0 in target:
        return _groups_without_elements(source, target)
    groups = []
    i = j = 0
    while i < len(source) and j < len(target):
        first, second = [i], [j]
        while (a := math.prod(source[k] for k in first)) != (b := math.prod(target[k] for k in second)):
            if a < b:
                first.append(first[-1] + 1)
            else:
                second.append(second[-1] + 1)
        groups.append((first, second))
        i, j = first[-1] + 1, second[-1] + 1
    return groups


def _groups_without_elements(source: Shape, target: Shape) -> list[tuple[list[int], list[int]]]:
    """Products tell nothing: the dims that both shapes have in front and at the end are themselves, what lies between is one run."""
    pairs = list(zip(source, target, strict=False))
    front = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    pairs = list(zip(reversed(source[front:]), reversed(target[front:]), strict=False))
    back = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    ends = len(source) - back, len(target) - back
    between = list(range(front, ends[0])), list(range(front, ends[1]))
    return [
        *(([i], [i]) for i in range(front)),
        *([between] if all(between) else []),
        *(([ends[0] + i], [ends[1] + i]) for i in range(back)),
    ]


def _survivor(
    spec: Spec,
    placement: Shard,
    group: tuple[list[int], list[int]] | None,
    kept: Placements,
    output: Placements,
    shape: Shape,
) -> Placement:
    """The cut of the new shape that gives every rank the elements it has; Replicate if there is none."""
    if group is None:
        return REPLICATE
    sources, targets = group
    if any(spec.shape[i] != 1 for i in sources[: sources.index(placement.dim)]):
        return REPLICATE  # each rank's elements are scattered over the run
    for dim in targets:
        candidate = Shard(dim)
        if _same_blocks(spec, (*kept, placement), (*output, candidate), shape, placement.dim, group, dim):
            return candidate
        if shape[dim] != 1:
            break
    return REPLICATE


def _same_blocks(
    spec: Spec,
    before: Placements,
    after: Placements,
    shape: Shape,
    source: int,
    group: tuple[list[int], list[int]],
    target: int,
) -> bool:
    inner_source = math.prod(spec.shape[i] for i in group[0] if i > source)
    inner_target = math.prod(shape[j] for j in group[1] if j > target)
    mesh_shape = spec.mesh.shape[: len(before)]
    for coordinate in itertools.product(*map(range, mesh_shape)):
        sizes, offsets = local_block(spec.shape, before, mesh_shape, coordinate)
        new_sizes, new_offsets = local_block(shape, after, mesh_shape, coordinate)
        if sizes[source] * inner_source != new_sizes[target] * inner_target:
            return False
        if sizes[source] and offsets[source] * inner_source != new_offsets[target] * inner_target:
            return False
    return True


@rule("view", params=("input", "shape"), packs=1, views=True)
def view(x: Any, shape: Any) -> Outcome:
    """view, reshape: ``shape`` may hold one -1."""
    shape = (shape,) if isinstance(shape, int) else shape
    if not isinstance(shape, (tuple, list)):
        raise ValueError(
            f"a shape is needed, got {shape!r}: other numbers come from to(dtype), not from the same bits"
        )
    return reshaped(x, _complete(x.shape, tuple(shape)))


@rule("view_as", params=("input", "other"), views=True)
def view_as(x: Any, other: Any) -> Outcome:
    """view_as, reshape_as: the shape of another tensor, whose placements do not matter."""
    found = view(x, other.shape)
    return Outcome((*found.inputs, other.placements), found.output, found.shape, run=found.run)


def _complete(source: Shape, wanted: Shape) -> Shape:
    total, known = math.prod(source), math.prod(n for n in wanted if n != -1)
    shape = tuple(total // known if n == -1 and known else n for n in wanted)
    if wanted.count(-1) > 1 or any(n < 0 for n in shape) or math.prod(shape) != total:
        raise ValueError(f"shape {wanted} does not hold the {total} elements of a tensor of shape {source}")
    return shape


@rule("flatten", params=("input", ("start_dim", 0), ("end_dim", -1)), views=True)
def flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Outcome:
    """Dims ``start_dim`` to ``end_dim`` become one."""
    ndim = len(x.shape)
    (first,), (last,) = dims_of(start_dim, max(ndim, 1)), dims_of(end_dim, max(ndim, 1))
    if first > last:
        raise ValueError(f"flatten from dim {start_dim} to dim {end_dim}: the first comes after the last")
    return reshaped(x, (*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :]))


@rule("unflatten", params=("input", "dim", "sizes"), views=True)
def unflatten(x: Any, dim: int, sizes: Any) -> Outcome:
    """One dim becomes several; ``sizes`` may hold one -1."""
    at = one_dim(dim, len(x.shape))
    return reshaped(x, (*x.shape[:at], *_complete(x.shape[at : at + 1], tuple(sizes)), *x.shape[at + 1 :]))


@rule("squeeze", params=("input", ("dim", None)), views=True)
def squeeze(x: Any, dim: Any = None) -> Outcome:
    """Dims of size 1 vanish: all, or those of ``dim``. Which they are, the global shape says."""
    asked: Sequence[int] = range(len(x.shape)) if dim is None else ()
    if dim is not None and dim != ():
        asked = dims_of(dim, len(x.shape))
    gone = {d for d in asked if x.shape[d] == 1}
    # The only row of a cut dim of size 1 lies on one rank: all others need it.
    kept = tuple(REPLICATE if isinstance(p, Shard) and p.dim in gone else p for p in x.placements)
    shift = [sum(d < i for d in gone) for i in range(len(x.shape))]
    output = tuple(Shard(p.dim - shift[p.dim]) if isinstance(p, Shard) else p for p in kept)
    return _as_reshape(x, kept, output, tuple(n for i, n in enumerate(x.shape) if i not in gone))


@rule("unsqueeze", params=("input", "dim"), views=True)
def unsqueeze(x: Any, dim: int) -> Outcome:
    """A new dim of size 1 at ``dim``."""
    (at,) = dims_of(dim, len(x.shape) + 1)
    output = tuple(Shard(p.dim + (p.dim >= at)) if isinstance(p, Shard) else p for p in x.placements)
    return _as_reshape(x, x.placements, output, (*x.shape[:at], 1, *x.shape[at:]))


@rule("ravel", params=("input",), views=True)
def ravel(x: Any) -> Outcome:
    """All dims become one."""
    return reshaped(x, (math.prod(x.shape),))


# ---------------------------------------------------------------------------------------------------- dims change places
def permuted(x: Spec, order: Sequence[int]) -> Outcome:
    """Dim ``order[i]`` becomes dim i."""
    output = tuple(Shard(order.index(p.dim)) if isinstance(p, Shard) else p for p in x.placements)
    return Outcome((x.placements,), output, tuple(x.shape[i] for i in order))


@rule("permute", params=("input", "dim"), packs=1, views=True)
def permute(x: Any, dim: Any) -> Outcome:
    """All dims in a new order."""
    order = dims_of(dim, len(x.shape)) if dim else ()
    if len(order) != len(x.shape):
        raise ValueError(f"permute of a tensor with {len(x.shape)} dims needs each of them once, got {dim!r}")
    return permuted(x, order)


@rule("transpose", params=("input", "dim0", ("dim1", None)), views=True)
def transpose(x: Any, dim0: Any, dim1: Any = None) -> Outcome:
    """Two dims change places; MindSpore also gives all dims in a new order."""
    if isinstance(dim0, tuple) and dim1 is None:
        return permute(x, dim0)
    if dim1 is None:
        raise ValueError(f"transpose needs two dims, got {dim0!r} alone")
    order = list(range(len(x.shape)))
    a, b = (one_place(dim, len(order)) for dim in (dim0, dim1))
    if order:
        order[a], order[b] = b, a
    return permuted(x, order)


@rule("t", params=("input",), views=True)
def t(x: Any) -> Outcome:
    """The transpose of a matrix; vectors and scalars stay."""
    if len(x.shape) > 2:
        raise ValueError(f"t() takes a matrix, got shape {x.shape}: name the dims with transpose(dim0, dim1)")
    return permuted(x, tuple(reversed(range(len(x.shape)))))


@rule("adjoint", params=("input",), views=True)
def adjoint(x: Any) -> Outcome:
    """The last two dims swapped, complex values conjugated."""
    return transpose(x, -2, -1)


@rule("movedim", params=("input", "source", "destination"), views=True)
def movedim(x: Any, source: Any, destination: Any) -> Outcome:
    """Dims move to other places; the others keep their order."""
    ndim = len(x.shape)
    taken, places = (dims_of(d, ndim) if d != () else () for d in (source, destination))
    if len(taken) != len(places):
        raise ValueError(f"movedim needs a place for each dim, got {source!r} and {destination!r}")
    found = dict(zip(places, taken, strict=True))
    rest = (d for d in range(ndim) if d not in taken)
    return permuted(x, [found[i] if i in found else next(rest) for i in range(ndim)])


# ----------------------------------------------------------------------------------------------------------- dims repeat
@rule("expand", params=("input", "shape"), packs=1, views=True)
def expand(x: Any, shape: Any) -> Outcome:
    """Dims of size 1 stretch, new ones come in front; -1 keeps a size."""
    new = len(shape) - len(x.shape)
    if new < 0 or -1 in shape[:new]:
        raise ValueError(
            f"cannot expand shape {x.shape} to {tuple(shape)}: give a size for each dim, new ones in front"
        )
    target = tuple(x.shape[i - new] if n == -1 else n for i, n in enumerate(shape))
    if any(x.shape[i] not in (1, target[i + new]) for i in range(len(x.shape))):
        raise ValueError(f"cannot expand shape {x.shape} to {tuple(shape)}: only dims of size 1 stretch")
    kept = tuple(
        REPLICATE if isinstance(p, Shard) and x.shape[p.dim] != target[p.dim + new] else p
        for p in x.placements
    )
    output = tuple(Shard(p.dim + new) if isinstance(p, Shard) else p for p in kept)
    local_shape, _ = local_block(target, output, x.mesh.shape, x.mesh.get_coordinate())
    return Outcome((kept,), output, target, replaced={1: local_shape})


@rule("expand_as", params=("input", "other"), views=True)
def expand_as(x: Any, other: Any) -> Outcome:
    """To the shape of another tensor, whose placements do not matter."""
    found = expand(x, other.shape)
    target = found.replaced[1]
    return Outcome(
        (*found.inputs, other.placements),
        found.output,
        found.shape,
        run=lambda local, _: local.expand(target),
    )
