"""Scaled dot product attention: cut along batches, heads and the sequence of queries; the sequence of keys is joined.

Heads may be grouped (several heads of queries share one of keys and values). Where the cut of the queries' heads does not fall
between groups, keys and values are whole and every rank takes the heads that its queries need.

A causal mask allows query i the keys up to i (aligned at the first query and the first key). A rank whose queries begin at
``offset`` needs the keys up to its last query only, and the mask is true where ``key <= offset + query``.

With dropout the attention is written out: see :mod:`hp_dtensor.rules.attention_dropout`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hp_dtensor.placements import REPLICATE, Shard
from hp_dtensor.rng.places import take
from hp_dtensor.rules.attention_dropout import dropped_attention
from hp_dtensor.rules.choice import Way
from hp_dtensor.rules.elementwise import broadcast_shape
from hp_dtensor.rules.labels import (
    Labelled,
    Operand,
    Role,
    aligned,
    labelled,
    numbered,
    zeros_of_product,
)
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec, local_block
from hp_platform import get_platform
from hp_platform.draws import Distribution

MASK = 3
"""The position of attn_mask."""
Prepare = Callable[[list[Any]], list[Any]]


@rule(
    "scaled_dot_product_attention",
    params=("query", "key", "value", ("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False)),
)
def scaled_dot_product_attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Outcome:
    """``softmax(q k^T scale + mask) v`` for q (..., heads, L, E), k (..., heads, S, E), v (..., heads, S, V)."""
    _check(q, k, v)
    if dropout_p:
        Distribution.event(dropout_p)
    if is_causal and mask is not None:
        raise ValueError("attn_mask and is_causal exclude each other: put the causal mask into attn_mask")
    is_grouped = enable_gqa and q.shape[-3] != k.shape[-3]
    heads = q.shape[-3:-2] if is_grouped else ()
    outer = [x.shape[: -3 if is_grouped else -2] for x in (q, k, v)]
    batch = broadcast_shape(outer) if any(outer) else ()
    names = numbered("batch", len(batch))
    of_heads = ("heads",) if is_grouped else ()
    rows = (*names, *of_heads, "query")
    operands = [
        Operand(
            i,
            x,
            (*aligned(own, batch, names), *of_heads, "query" if i == 0 else "", ""),
            Role.FACTOR if i == 2 else Role.PLAIN,
        )
        for i, (x, own) in enumerate(zip((q, k, v), outer, strict=True))
    ]
    scores = (*batch, *heads, q.shape[-2], k.shape[-2])
    if isinstance(mask, Spec):
        if broadcast_shape([mask.shape, scores]) != scores:
            raise ValueError(
                f"attn_mask has shape {mask.shape}, the scores {scores}: it must stretch to that"
            )
        operands.append(Operand(MASK, mask, aligned(mask.shape, scores, (*rows, "")), Role.PLAIN))
    result = Labelled((*rows, ""), (*scores[:-1], v.shape[-1]))
    found = labelled(
        operands,
        [result],
        evenly={"heads": k.shape[-3]} if is_grouped else {},
        more_ways=_queries_alone(operands) if is_grouped else (),
    )
    assert found.output is not None
    shape, offset = _piece(found.output, result.shape, q)
    if 0 in shape:  # see [Note: empty pieces] in hp_dtensor.no_elements: fused kernels refuse no heads

        def without_elements(*local: Any, **_: Any) -> Any:
            if dropout_p and get_platform().device_of(local[0]) != "meta":
                take(None)  # every rank takes the operation's place in the stream
            return zeros_of_product(shape, local[:3])

        return replace(found, run=without_elements)
    steps: list[Prepare] = []
    if is_grouped:
        steps.extend(_own_groups(q, k, found))
    if is_causal and shape[-2] < result.shape[-2]:
        steps.append(_causal_from(offset[-2], shape[-2], k.shape[-2]))
    prepare = _in_turn(steps) if steps else None
    if dropout_p:
        return replace(found, run=dropped_attention(dropout_p, scores, offset, prepare))
    return replace(found, prepare=prepare) if steps else found


def _check(q: Any, k: Any, v: Any) -> None:
    if not all(isinstance(x, Spec) and len(x.shape) >= 2 for x in (q, k, v)):
        raise ValueError("scaled_dot_product_attention takes tensors (..., heads, length, size)")
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise ValueError(
            f"queries {q.shape}, keys {k.shape}, values {v.shape}: queries and keys need one size, keys and values one length"
        )


def _queries_alone(operands: list[Operand]) -> list[Way]:
    """Only the heads of the queries (and of their mask) are cut."""
    return [
        Way(
            tuple(
                Shard(operand.labels.index("heads"))
                if operand.place in (0, MASK) and "heads" in operand.labels
                else REPLICATE
                for operand in operands
            ),
            Shard(len(operands[0].labels) - 3),
        )
    ]


def _piece(placements: Any, shape: tuple[int, ...], like: Spec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return local_block(shape, placements, like.mesh.shape, like.mesh.get_coordinate())


def _own_groups(q: Spec, k: Spec, found: Outcome) -> list[Prepare]:
    """Takes the heads of keys and values that this rank's queries need; nothing to do where they are the rank's own."""
    per_group = q.shape[-3] // k.shape[-3]
    of_q, from_q = _piece(found.inputs[0], q.shape, q)
    of_k, from_k = _piece(found.inputs[1], k.shape, k)
    groups = [(from_q[-3] + i) // per_group - from_k[-3] for i in range(of_q[-3])]
    if from_q[-3] % per_group == 0 and of_q[-3] % per_group == 0:
        groups = groups[::per_group]
    elif len(set(groups)) == 1:
        groups = groups[:1]
    if groups == list(range(of_k[-3])):
        return []

    def take(x: Any) -> Any:
        platform = get_platform()
        first, last = groups[0], groups[-1]
        dim = len(x.shape) - 3
        if groups == list(range(first, last + 1)):
            return platform.narrow(x, dim, first, len(groups))
        return platform.cat([platform.narrow(x, dim, group, 1) for group in groups], dim)

    return [lambda local: [local[0], take(local[1]), take(local[2]), *local[3:]]]


def _causal_from(offset: int, num_queries: int, num_keys: int) -> Prepare:
    """The causal mask for queries that begin at ``offset``."""
    needed = min(num_keys, offset + num_queries)

    def prepare(local: list[Any]) -> list[Any]:
        platform = get_platform()
        q, k, v, *_ = local
        k, v = (platform.narrow(x, len(x.shape) - 2, 0, needed) for x in (k, v))
        if offset == 0 or offset >= num_keys:
            return [q, k, v, None, 0.0, offset == 0]
        device = platform.device_of(q)
        rows = platform.reshape(platform.arange(offset, offset + num_queries, device=device), (-1, 1))
        return [q, k, v, platform.arange(0, needed, device=device) <= rows, 0.0, False]

    return prepare


def _in_turn(steps: list[Prepare]) -> Prepare:
    def prepare(local: list[Any]) -> list[Any]:
        for step in steps:
            local = step(local)
        return local

    return prepare
