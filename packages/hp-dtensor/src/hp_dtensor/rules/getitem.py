"""``x[...]``: ints, slices, new dims, tensors of places, masks, and all of them mixed.

Slices keep cuts as :mod:`hp_dtensor.rules.slices` says. Dims that tensors index are joined (of a single index: each rank looks
up what it has); cuts of the index are cuts of the result. With a mask everything is joined: how many elements it takes, all
ranks must agree on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.placements import PARTIAL, REPLICATE, Placement, Shard
from hp_dtensor.rules.choice import Way
from hp_dtensor.rules.labels import Labelled, Operand, Role, aligned, labelled, numbered
from hp_dtensor.rules.lookup import looked_up
from hp_dtensor.rules.refusals import checked
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.rules.slices import Part, Parts
from hp_dtensor.rules.subscript import Subscript, Template, common_shape, normalised, parsed
from hp_dtensor.spec import Spec, local_block, make_spec
from hp_platform import get_platform

Tensor = Any


@rule("getitem", params=("input", "index"), normalise=normalised, views=True)
def getitem(x: Any, template: Template, *tensors: Any) -> Outcome:
    """Part of a tensor."""
    found = parsed(x, template, tensors)
    if not tensors:
        return _of_parts(x, found)
    if found.has_masks:
        every = Outcome.of_values(x, template, *tensors)
        whole = Parts(_whole(x), found.parts, found.dropped)
        return Outcome(
            every.inputs,
            None,
            is_sized_by_values=True,
            run=lambda local, _, *at: _read(whole, found, local, at),
        )
    return _of_indices(x, found, tensors)


def _whole(x: Spec) -> Spec:
    return make_spec(x.mesh, (REPLICATE,) * len(x.placements), x.shape)


def _of_parts(x: Spec, found: Subscript) -> Outcome:
    taken = Parts(x, found.parts, found.dropped)
    order = found.plain()
    shape = tuple(1 if d is None else found.parts[d].count for d in order)
    left = [d for d in range(len(x.shape)) if d not in found.dropped]
    moved = {left.index(d): i for i, d in enumerate(order) if d is not None}
    output: tuple[Placement, ...] = tuple(
        Shard(moved[p.dim]) if isinstance(p, Shard) else p for p in taken.output
    )

    def run(local: Tensor, _: Any) -> Tensor:
        return _with_new_dims(taken.taken(local), order)

    return Outcome((taken.kept,), output, shape, run=run)


def _with_new_dims(x: Tensor, order: Sequence[Any]) -> Tensor:
    if None not in order:
        return x
    return x[tuple(None if d is None else slice(None) for d in order)]


def _of_indices(x: Spec, found: Subscript, tensors: Sequence[Spec]) -> Outcome:
    common = common_shape(found, tensors)
    names = numbered("index", len(common))
    indexed = set(found.indexed)
    whole = [
        part == Part(0, 1, n) and d not in found.dropped
        for d, (part, n) in enumerate(zip(found.parts, x.shape, strict=True))
    ]
    labels = tuple(f"dim {d}" if whole[d] and d not in indexed else "" for d in range(len(x.shape)))
    plain = [("", 1) if d is None else (labels[d], found.parts[d].count) for d in found.plain()]
    place = found.place()
    pairs = [*plain[:place], *zip(names, common, strict=True), *plain[place:]]
    operands = [
        Operand(0, x, labels),
        *(Operand(i + 2, t, aligned(t.shape, common, names), Role.PLAIN) for i, t in enumerate(tensors)),
    ]
    single = len(tensors) == 1 and all(whole)
    ways = [Way((Shard(next(iter(indexed))), REPLICATE), PARTIAL)] if single else []
    result = Labelled(tuple(label for label, _ in pairs), tuple(n for _, n in pairs))
    outcome = labelled(operands, [result], more_ways=ways)
    sizes = {i + 2: x.shape[d] for i, d in enumerate(found.indexed)}
    outcome = checked(outcome, sizes, from_end=True)
    kept = outcome.inputs[0]
    if single and any(p.is_shard(next(iter(indexed))) for p in kept):
        return _looked_up(x, found, outcome)
    taken = Parts(make_spec(x.mesh, kept, x.shape), found.parts, found.dropped)
    return replace(outcome, run=lambda local, _, *at: _read(taken, found, local, at))


def _read(taken: Parts, found: Subscript, local: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Slices and ints first, then the tensors: so ints do not come between tensors."""
    index = tuple(
        tensors[e[1]] if isinstance(e, tuple) else None if e is None else slice(None) for e in found.order
    )
    return taken.taken(local)[index]


def _looked_up(x: Spec, found: Subscript, outcome: Outcome) -> Outcome:
    """Of a single index into a cut dim: what this rank has, zeros for the rest."""
    (dim,) = found.indexed
    sizes, offsets = local_block(x.shape, outcome.inputs[0], x.mesh.shape, x.mesh.get_coordinate())
    n, size, offset = x.shape[dim], sizes[dim], offsets[dim]

    def run(local: Tensor, _: Any, at: Tensor) -> Tensor:
        platform = get_platform()
        at = platform.where(at < 0, at + n, at)
        y = looked_up(local, dim, at, offset, size, n)
        order = [
            e if e is None else 0
            for e in found.order
            for _ in range(len(at.shape) if isinstance(e, tuple) else 1)
        ]
        return _with_new_dims(y, order)

    return replace(outcome, run=run)
