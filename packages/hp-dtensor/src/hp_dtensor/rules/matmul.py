"""Matrix products: every operand's dims have labels, and a label may be cut on all operands that have it.

A label that the result lacks (the contraction) leaves a sum behind; a product with one factor that is a sum is a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.empty import zeros_from
from hp_dtensor.placements import PARTIAL, REPLICATE, Partial, Placement, Shard
from hp_dtensor.rules.choice import Way, choose
from hp_dtensor.rules.elementwise import broadcast_shape
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec, local_block
from hp_platform import get_platform

Labels = tuple[str, ...]


def contraction(
    a: Spec, b: Spec, labels: tuple[Labels, Labels, Labels], shape: tuple[int, ...], added: Spec | None = None
) -> Outcome:
    """``result[labels[2]] = sum of a[labels[0]] * b[labels[1]]``, plus ``added``, whose dims are the result's last ones.

    A dim of size 1 that stretches to a larger one has the label ``""``: it is never cut.
    """
    specs = [a, b] if added is None else [a, b, added]
    last = labels[2][len(labels[2]) - len(added.shape) :] if added is not None else ()
    of_inputs = [labels[0], labels[1], last][: len(specs)]
    all_labels = list(dict.fromkeys(label for own in of_inputs[:2] for label in own if label))

    def way(label: str) -> Way:
        if label in labels[2]:
            inputs = tuple(_cut(own, label) for own in of_inputs)
            return Way(inputs, Shard(labels[2].index(label)))
        # What is added belongs to one of the summands only.
        return Way((*(_cut(own, label) for own in of_inputs[:2]), PARTIAL)[: len(specs)], PARTIAL)

    wanted: list[list[Placement]] = [[] for _ in specs]
    output = []
    for mesh_dim in range(len(a.placements)):
        now = [spec.placements[mesh_dim] for spec in specs]
        ways = [Way((REPLICATE,) * len(specs), REPLICATE), *map(way, all_labels), *_sums(now)]
        best = choose(specs, mesh_dim, ways, math.prod(shape))
        output.append(best.output)
        for list_of_one, placement in zip(wanted, best.inputs, strict=True):
            list_of_one.append(placement)
    return Outcome(tuple(map(tuple, wanted)), tuple(output), shape)


def _cut(own: Labels, label: str) -> Placement:
    return Shard(own.index(label)) if label in own else REPLICATE


def _sums(now: Sequence[Placement]) -> list[Way]:
    """One factor is a sum, the other whole; what is added becomes a sum of the same kind."""
    ways = []
    for place in (0, 1):
        kind = now[place]
        if isinstance(kind, Partial):
            inputs = [kind if other == place else REPLICATE for other in (0, 1)] + [kind] * (len(now) - 2)
            ways.append(Way(tuple(inputs), kind))
    return ways


@rule("matmul", params=("input", "other"))
def matmul(a: Any, b: Any) -> Outcome:
    """matmul, mm, bmm, mv, dot: vectors, matrices and batches of them, broadcast over the batch dims."""
    _check_both(a, b)
    if not a.shape or not b.shape:
        raise ValueError(f"matmul needs vectors or matrices, got shapes {a.shape} and {b.shape}")
    row: Labels = ("m",) if len(a.shape) > 1 else ()
    column: Labels = ("n",) if len(b.shape) > 1 else ()
    inner_b = b.shape[-2] if column else b.shape[-1]
    if a.shape[-1] != inner_b:
        raise ValueError(
            f"matmul of shapes {a.shape} and {b.shape}: the inner sizes {a.shape[-1]} and {inner_b} differ"
        )
    outer_a, outer_b = a.shape[:-2], b.shape[:-2]
    batch = broadcast_shape([outer_a, outer_b]) if outer_a or outer_b else ()
    labels = (
        (*_batch_labels(outer_a, batch), *row, "k"),
        (*_batch_labels(outer_b, batch), "k", *column),
        (*_batch_labels(batch, batch), *row, *column),
    )
    shape = (*batch, *(a.shape[-2:-1] if row else ()), *(b.shape[-1:] if column else ()))
    return _of_nothing(contraction(a, b, labels, shape), a, get_platform().matmul)


@rule("linear", params=("input", "weight", ("bias", None)))
def linear(x: Any, weight: Any, bias: Any = None) -> Outcome:
    """``x (..., in) @ weight (out, in).T + bias (out,)``."""
    _check_both(x, weight)
    if len(weight.shape) != 2 or not x.shape or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear needs x (..., in) and weight (out, in), got shapes {x.shape} and {weight.shape}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"linear with weight {weight.shape} needs a bias {weight.shape[:1]}, got shape {bias.shape}"
        )
    outer = x.shape[:-1]
    batch = _batch_labels(outer, outer)
    found = contraction(
        x, weight, ((*batch, "k"), ("n", "k"), (*batch, "n")), (*outer, weight.shape[0]), bias
    )
    found = _of_nothing(found, x, get_platform().linear)
    return found if bias is not None else replace(found, inputs=(*found.inputs, None))


def _of_nothing(found: Outcome, a: Spec, product: Callable[..., Any]) -> Outcome:
    """The outcome, with a run of its own where this rank has nothing to contract: see [Note: empty pieces]."""
    assert found.inputs[0] is not None
    piece, _ = local_block(a.shape, found.inputs[0], a.mesh.shape, a.mesh.get_coordinate())
    if piece[-1] != 0:
        return found

    def run(x: Any, y: Any, added: Any = None) -> Any:
        with get_platform().no_grad():
            like = product(x, y)
        zeros = zeros_from(like, [x, y])
        return zeros if added is None else zeros + added

    return replace(found, run=run)


def _batch_labels(own: tuple[int, ...], batch: tuple[int, ...]) -> Labels:
    """Batch dims are named from the last one on; one that stretches has no label."""
    return tuple(
        "" if size != batch[place - len(own)] else f"batch {len(own) - place}"
        for place, size in enumerate(own)
    )


def _check_both(a: Any, b: Any) -> None:
    if not (isinstance(a, Spec) and isinstance(b, Spec)):
        raise ValueError("both factors of a matrix product must be tensors")


@rule("reversed_matmul", params=("input", "other"))
def reversed_matmul(b: Any, a: Any) -> Outcome:
    """``a @ b`` where Python asks ``b`` first, because ``a`` is a plain tensor."""
    found = matmul(a, b)
    run = found.run
    return replace(
        found,
        inputs=(found.inputs[1], found.inputs[0]),
        run=None if run is None else lambda y, x: run(x, y),
    )
