"""Rows of a table at ids. Of a table with cut rows every rank looks up its own, and gives zeros for the rest: a summand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hp_dtensor.placements import PARTIAL, REPLICATE, Shard
from hp_dtensor.rules.choice import Way
from hp_dtensor.rules.labels import Labelled, Operand, Role, labelled, numbered
from hp_dtensor.rules.lookup import is_cut, own_block, own_numbers, with_an_element, zero_elsewhere
from hp_dtensor.rules.refusals import checked
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec

Tensor = Any


def check_options(max_norm: Any, sparse: bool) -> None:
    """ValueError for the options of embeddings that have no sharded form."""
    if max_norm is not None:
        raise ValueError(
            "max_norm would change the weight in forward: normalise it after the optimizer's step instead"
        )
    if sparse:
        raise ValueError("sparse gradients have no placements: leave sparse out")


@rule(
    "embedding",
    params=(
        "input",
        "weight",
        ("padding_idx", None),
        ("max_norm", None),
        ("norm_type", 2.0),
        ("scale_grad_by_freq", False),
        ("sparse", False),
    ),
)
def embedding(
    ids: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Outcome:
    """Rows of ``weight (num, dim)`` at ``ids``; the result of cut ids, or of a weight with cut columns, is cut likewise.

    Of a weight with cut rows every rank looks up its own: a summand. An id that is no row is refused by the ranks that have the
    id: of whole ids by all; of cut ids the others go on, to wait for these at the next collective.
    """
    if not (isinstance(ids, Spec) and isinstance(weight, Spec)):
        raise ValueError("embedding needs tensors for ids and weight")
    if len(weight.shape) != 2:
        raise ValueError(f"the weight of an embedding has two dims, got shape {weight.shape}")
    check_options(max_norm, sparse)
    rows = weight.shape[0]
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise ValueError(f"padding_idx {padding_idx} is not among the {rows} rows of the weight")
    # How often an id occurs counts over all of them.
    names = ("",) * len(ids.shape) if scale_grad_by_freq else numbered("id", len(ids.shape))
    found = labelled(
        [Operand(0, ids, names, Role.PLAIN), Operand(1, weight, ("", "dim"))],
        [Labelled((*names, "dim"), (*ids.shape, weight.shape[1]))],
        more_ways=[] if scale_grad_by_freq else [Way((REPLICATE, Shard(0)), PARTIAL)],
    )
    found = checked(found, {0: rows})
    return _of_own_rows(weight, found) if is_cut(found, 1, 0) else found


def _of_own_rows(weight: Spec, found: Outcome) -> Outcome:
    offset, size = own_block(weight, found, 1, 0)
    rows = weight.shape[0]

    def around(kernel: Any) -> Any:
        def run(ids: Tensor, local: Tensor, padding_idx: Any = None, *rest: Any) -> Tensor:
            mine, own = own_numbers(ids, offset, size, rows)
            padding = None if padding_idx is None else padding_idx % rows - offset
            if padding is not None and not 0 <= padding < size:
                padding = None
            return zero_elsewhere(kernel(own, with_an_element(local, 0), padding, *rest), mine, 0)

        return run

    return replace(found, around=around)


@rule(
    "rows_of",
    params=("weight", "indices", ("padding_idx", -1), ("scale_grad_by_freq", False), ("sparse", False)),
)
def rows_of(
    weight: Any, ids: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Outcome:
    """embedding with the weight first, and -1 for no padding."""
    padding = None if padding_idx < 0 else padding_idx
    found = embedding(ids, weight, padding, None, 2.0, scale_grad_by_freq, sparse)
    found = replace(found, inputs=(found.inputs[1], found.inputs[0]), checks={1: found.checks[0]})
    if found.around is None:
        return found
    outer = found.around

    def around(kernel: Any) -> Any:
        def in_other_order(ids: Tensor, local: Tensor, own_padding: Any, *rest: Any) -> Tensor:
            return kernel(local, ids, -1 if own_padding is None else own_padding, *rest)

        run = outer(in_other_order)
        return lambda local, ids, _=-1, *rest: run(ids, local, padding, *rest)

    return replace(found, around=around)
