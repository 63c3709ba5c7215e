"""Sums, means and extremes of bags of embeddings: cut along bags, and along the columns of the weight."""

from __future__ import annotations

from typing import Any

from hp_dtensor.rules.embedding import check_options
from hp_dtensor.rules.labels import Labelled, Labels, Operand, Role
from hp_dtensor.rules.patches import linear_in_first
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec

_LAST = (("include_last_offset", False), ("padding_idx", None))


@rule(
    "embedding_bag",
    params=(
        "input", "weight", ("offsets", None), ("max_norm", None), ("norm_type", 2.0), ("scale_grad_by_freq", False),
        ("mode", "mean"), ("sparse", False), ("per_sample_weights", None), *_LAST,
    ),
)  # fmt: skip
def embedding_bag(
    ids: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: Any = None,
) -> Outcome:
    """Rows of ``weight (num, dim)`` at ``ids (bags, size)``, one row per bag; rows of the weight are joined.

    Bags that ``offsets`` cut out of a vector of ids have any sizes, so every rank needs all ids.
    """
    if not (isinstance(ids, Spec) and isinstance(weight, Spec) and len(weight.shape) == 2):
        raise ValueError(f"embedding_bag takes ids and a weight (num, dim), got {ids} and {weight}")
    check_options(max_norm, sparse)
    has_offsets = isinstance(offsets, Spec)
    if len(ids.shape) != (1 if has_offsets else 2):
        raise ValueError(
            f"embedding_bag takes ids (bags, size), or a vector of ids and offsets, got ids {ids} and offsets {offsets}"
        )
    # How often an id occurs counts over all of them.
    bag = "" if has_offsets or scale_grad_by_freq else "bag"
    # A sum of some of a bag is a summand of that of all.
    of_ids: Labels = (
        ("",) if has_offsets else (bag, "member" if mode == "sum" and not scale_grad_by_freq else "")
    )
    count = offsets.shape[0] - bool(include_last_offset) if has_offsets else ids.shape[0]
    operands = [
        Operand(1, weight, ("", "dim"), Role.PLAIN if mode == "max" else Role.FACTOR),
        Operand(0, ids, of_ids, Role.PLAIN),
    ]
    if has_offsets:
        operands.append(Operand(2, offsets, ("",), Role.PLAIN))
    if isinstance(per_sample_weights, Spec):
        if per_sample_weights.shape != ids.shape:
            raise ValueError(
                f"per_sample_weights have the shape {ids.shape} of ids, got {per_sample_weights}"
            )
        operands.append(Operand(8, per_sample_weights, of_ids))
    return linear_in_first(operands, Labelled((bag, "dim"), (count, weight.shape[1])))
