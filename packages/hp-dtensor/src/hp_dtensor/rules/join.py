"""Tensors put together: cat, stack and their kin, grids. Linear in all of them at once.

The dim along which they are put together is joined first: the chunks of the parts are not the chunks of the whole. One tensor
alone stays as it is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.placements import REPLICATE, Placement, Shard
from hp_dtensor.rules.elementwise import broadcast_shape
from hp_dtensor.rules.labels import Labelled, Labels, Operand, Role, aligned, labelled, local_shape, numbered
from hp_dtensor.rules.reduction import dims_of
from hp_dtensor.rules.registry import EVERY_KIND, Outcome, Result, rule
from hp_dtensor.spec import Spec
from hp_platform import get_platform

Shape = tuple[int, ...]
Form = tuple[Shape, tuple[int, ...]]
"""A shape that a tensor takes before it is put to others, and where its own dims then are."""


def _members(tensors: Any) -> tuple[Spec, ...]:
    members = () if isinstance(tensors, Spec) else tuple(tensors)
    if not members or not all(isinstance(x, Spec) for x in members):
        shown = "one tensor" if isinstance(tensors, Spec) else f"{len(members)} members"
        raise ValueError(f"needs a list of at least one tensor and nothing else, got {shown}")
    return members


def _operands(members: Sequence[Spec], labels: Sequence[Labels]) -> list[Operand]:
    roles = [Role.FACTOR] + [Role.SUMMAND] * (len(members) - 1)
    return [
        Operand((0, i), x, own, role)
        for i, (x, own, role) in enumerate(zip(members, labels, roles, strict=True))
    ]


def _put_together(members: Sequence[Spec], forms: Sequence[Form], dim: int) -> Outcome:
    shapes = [shape for shape, _ in forms]
    rest = [(*shape[:dim], *shape[dim + 1 :]) for shape in shapes]
    if any(
        len(shape) != len(shapes[0]) or other != rest[0] for shape, other in zip(shapes, rest, strict=True)
    ):
        raise ValueError(
            f"shapes {', '.join(str(x.shape) for x in members)} do not fit together along dim {dim}: all other dims must agree"
        )
    # A dim that one of them does not have by itself is of size 1 there, and cannot be cut with the others.
    everywhere = set.intersection(*(set(where) for _, where in forms))
    names = [
        f"dim {i}" if i in everywhere and (i != dim or len(members) == 1) else ""
        for i in range(len(shapes[0]))
    ]
    labels = [tuple(names[i] for i in where) for _, where in forms]
    size = sum(shape[dim] for shape in shapes)
    shape = (*shapes[0][:dim], size, *shapes[0][dim + 1 :])
    return labelled(_operands(members, labels), [Labelled(tuple(names), shape)])


def _as_it_is(x: Spec) -> Form:
    return x.shape, tuple(range(len(x.shape)))


def at_least(shape: Shape, ndim: int) -> Form:
    """The shape of ``atleast_1d`` (2d, 3d): a vector is a row, a matrix a plane of depth 1."""
    if len(shape) >= ndim:
        return shape, tuple(range(len(shape)))
    if ndim == 3 and len(shape) == 2:
        return (*shape, 1), (0, 1)
    if ndim == 3 and len(shape) == 1:
        return (1, *shape, 1), (1,)
    missing = ndim - len(shape)
    return (1,) * missing + shape, tuple(range(missing, ndim))


@rule("cat", params=("tensors", ("dim", 0)), carries=EVERY_KIND)
def cat(tensors: Any, dim: int = 0) -> Outcome:
    """cat, concat, concatenate."""
    members = _members(tensors)
    ndim = max(len(x.shape) for x in members)
    (at,) = dims_of(dim, ndim)
    # An old custom of torch: a tensor of shape (0,) counts for nothing, whatever the others' dims.
    nothing = [ndim > 1 and x.shape == (0,) for x in members]
    if not any(nothing):
        return _put_together(members, [_as_it_is(x) for x in members], at)
    real = [x for x, skipped in zip(members, nothing, strict=True) if not skipped]
    found = _put_together(real, [_as_it_is(x) for x in real], at)
    wishes = iter(found.inputs[0])
    whole = (REPLICATE,) * len(real[0].placements)
    inputs = tuple(whole if skipped else next(wishes) for skipped in nothing)
    return replace(found, inputs=(inputs,))


@rule("stack", params=("tensors", ("dim", 0)), carries=EVERY_KIND)
def stack(tensors: Any, dim: int = 0) -> Outcome:
    """Along a new dim."""
    members = _members(tensors)
    ndim = len(members[0].shape)
    (at,) = dims_of(dim, ndim + 1)
    where = tuple(i + (i >= at) for i in range(ndim))
    forms = [((*x.shape[:at], 1, *x.shape[at:]), where) for x in members]
    if any(x.shape != members[0].shape for x in members):
        raise ValueError(f"stack needs equal shapes, got {', '.join(str(x.shape) for x in members)}")
    return _put_together(members, forms, at)


@rule("hstack", params=("tensors",), carries=EVERY_KIND)
def hstack(tensors: Any) -> Outcome:
    """Beside each other: vectors along dim 0, all else along dim 1."""
    members = _members(tensors)
    forms = [at_least(x.shape, 1) for x in members]
    return _put_together(members, forms, 0 if len(forms[0][0]) == 1 else 1)


@rule("vstack", params=("tensors",), carries=EVERY_KIND)
def vstack(tensors: Any) -> Outcome:
    """Below each other: vectors are rows."""
    members = _members(tensors)
    return _put_together(members, [at_least(x.shape, 2) for x in members], 0)


@rule("dstack", params=("tensors",), carries=EVERY_KIND)
def dstack(tensors: Any) -> Outcome:
    """Behind each other, along dim 2."""
    members = _members(tensors)
    return _put_together(members, [at_least(x.shape, 3) for x in members], 2)


@rule("column_stack", params=("tensors",), carries=EVERY_KIND)
def column_stack(tensors: Any) -> Outcome:
    """Beside each other: vectors are columns."""
    members = _members(tensors)
    forms = [((*x.shape, *(1,) * (2 - len(x.shape))), tuple(range(len(x.shape)))) for x in members]
    return _put_together(members, forms, 1)


def _loose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``f(a, b)`` as ``f((a, b))``."""
    one_list = len(args) == 1 and isinstance(args[0], (list, tuple))
    return (args if one_list else (tuple(args),)), kwargs


@rule("atleast_1d", normalise=_loose, carries=EVERY_KIND)
def atleast_1d(tensors: Any) -> Outcome:
    """A scalar becomes a vector."""
    return _each_at_least(tensors, 1)


@rule("atleast_2d", normalise=_loose, carries=EVERY_KIND)
def atleast_2d(tensors: Any) -> Outcome:
    """A vector becomes a row."""
    return _each_at_least(tensors, 2)


@rule("atleast_3d", normalise=_loose, carries=EVERY_KIND)
def atleast_3d(tensors: Any) -> Outcome:
    """A matrix becomes a plane of depth 1."""
    return _each_at_least(tensors, 3)


def _each_at_least(tensors: Any, ndim: int) -> Outcome:
    """One tensor for one, a tuple for several. Only dims of size 1 are new: each stays as it is cut."""
    members = _members(tensors)
    # Along a mesh dim all results are Replicate, or none is: see Outcome.outputs.
    alike = [len({p.is_replicate() for p in column}) == 1 for column in _columns(members)]
    inputs = tuple(
        tuple(p if same else REPLICATE for p, same in zip(x.placements, alike, strict=True)) for x in members
    )
    results, local_shapes = [], []
    for x, lies in zip(members, inputs, strict=True):
        shape, where = at_least(x.shape, ndim)
        output = tuple(replace(p, dim=where[p.dim]) if isinstance(p, Shard) else p for p in lies)
        results.append(Result(output, shape))
        local_shapes.append(local_shape(x, output, shape))

    def run(locals_: Sequence[Any]) -> Any:
        reshape = get_platform().reshape
        shaped = tuple(reshape(x, shape) for x, shape in zip(locals_, local_shapes, strict=True))
        return shaped if len(shaped) > 1 else shaped[0]

    if len(members) == 1:
        return Outcome((inputs,), results[0].placements, results[0].shape, run=run)
    return Outcome((inputs,), None, run=run, outputs=tuple(results))


def _columns(members: Sequence[Spec]) -> Iterator[tuple[Placement, ...]]:
    """For each mesh dim, how all tensors lie along it."""
    return zip(*(x.placements for x in members), strict=True)


@rule("broadcast_tensors", normalise=_loose, carries=EVERY_KIND)
def broadcast_tensors(tensors: Any) -> Outcome:
    """Each stretched to the common shape. All results are cut alike."""
    members = _members(tensors)
    shape = broadcast_shape([x.shape for x in members])
    labels = numbered("dim", len(shape))
    operands = _operands(members, [aligned(x.shape, shape, labels) for x in members])
    found = labelled(operands, [Labelled(labels, shape)] * len(members), is_tuple=True)
    assert found.outputs is not None and found.outputs[0] is not None
    target = local_shape(members[0], found.outputs[0].placements, shape)
    # Not the operation itself, which takes its tensors loose.
    return replace(found, run=lambda locals_: tuple(x.expand(target) for x in locals_))


@rule("meshgrid", normalise=_loose, carries=EVERY_KIND)
def meshgrid(tensors: Any, *, indexing: str = "ij") -> Outcome:
    """One grid per vector, in which it runs along its own dim; with ``indexing="xy"`` the first two dims are swapped."""
    members = _members(tensors)
    if indexing not in ("ij", "xy"):
        raise ValueError(f"indexing is 'ij' or 'xy', got {indexing!r}")
    if any(len(x.shape) > 1 for x in members):
        raise ValueError(f"meshgrid needs vectors, got shapes {', '.join(str(x.shape) for x in members)}")
    labels = numbered("vector", len(members))
    order = list(range(len(members)))
    if indexing == "xy" and len(order) > 1:
        order[0], order[1] = 1, 0
    operands = _operands(members, [labels[i : i + len(x.shape)] for i, x in enumerate(members)])
    grid = Labelled(tuple(labels[i] for i in order), tuple((*members[i].shape, 1)[0] for i in order))
    return labelled(operands, [grid] * len(members), is_tuple=True)
