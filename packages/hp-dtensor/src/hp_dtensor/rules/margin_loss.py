"""Losses of several tensors that meet row by row or element by element: margins, embeddings, Poisson counts, CTC.

Every rank adds up the losses of its rows: a Partial, without communication. A mean divides that by the number of the whole.
They are entered under the functions that torch's own losses end in, which get the reduction as a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.no_elements import zeros_from
from hp_dtensor.placements import PARTIAL, Shard
from hp_dtensor.rules.elementwise import broadcast_shape
from hp_dtensor.rules.labels import Labelled, Labels, Operand, Role, aligned, labelled, numbered
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec
from hp_platform import get_platform

Tensor = Any
NONE, MEAN, SUM = 0, 1, 2
"""The reductions. One that is left out is none to these functions, whatever torch's signatures say."""


@dataclass(frozen=True)
class Rows:
    """How the tensors of a loss meet."""

    labels: tuple[Labels, ...]
    """Of each tensor."""
    result: Labelled
    """The losses, not reduced yet."""


def _of_elements(shapes: Sequence[tuple[int, ...]]) -> Rows:
    shape = broadcast_shape(shapes)
    names = numbered("dim", len(shape))
    return Rows(tuple(aligned(own, shape, names) for own in shapes), Labelled(names, shape))


def _of_vectors(shapes: Sequence[tuple[int, ...]]) -> Rows:
    """All tensors hold vectors in their last dim, which lies whole."""
    shape = broadcast_shape(shapes)
    names = (*numbered("dim", len(shape) - 1), "")
    return Rows(
        tuple((*aligned(own[:-1], shape[:-1], names[:-1]), "") for own in shapes),
        Labelled(names[:-1], shape[:-1]),
    )


def _of_vectors_with_targets(shapes: Sequence[tuple[int, ...]]) -> Rows:
    """The last tensor has a number for each vector of the others."""
    found = _of_vectors(shapes[:-1])
    if shapes[-1] != found.result.shape:
        raise ValueError(f"targets of shape {found.result.shape} are needed, got {shapes[-1]}")
    return Rows((*found.labels, found.result.labels), found.result)


def _of_scores(shapes: Sequence[tuple[int, ...]]) -> Rows:
    """Scores ``(n, classes)`` or ``(classes,)``, and a number or a row of numbers for each."""
    scores, target = shapes
    first: Labels = ("dim 0",) if len(scores) == 2 else ()
    if len(scores) not in (1, 2) or target not in (scores, scores[:-1]):
        raise ValueError(f"scores (n, classes) with targets (n,) or (n, classes), got {scores} and {target}")
    of_target = (*first, "") if len(target) > len(first) else first
    return Rows(((*first, ""), of_target), Labelled(first, scores[:-1]))


def _enter(
    name: str,
    tensors: Sequence[str],
    options: Sequence[tuple[str, Any]],
    meet: Callable[[Sequence[tuple[int, ...]]], Rows],
) -> None:
    count = len(tensors)

    @rule(name, params=(*tensors, *options, ("reduction", NONE)))
    def plan(*args: Any) -> Outcome:
        given, rest = args[:count], args[count:]
        reduction = rest[len(options)] if len(rest) > len(options) else NONE
        if not all(isinstance(x, Spec) for x in given):
            raise ValueError(f"{name} takes tensors for {', '.join(tensors)}")
        if reduction not in (NONE, MEAN, SUM):
            raise ValueError(f"the reduction of {name} is 0 (none), 1 (mean) or 2 (sum), got {reduction!r}")
        rows = meet([x.shape for x in given])
        operands = [Operand(i, x, rows.labels[i], Role.PLAIN) for i, x in enumerate(given)]
        operands.extend(
            Operand(count + i, x, ("",) * len(x.shape), Role.PLAIN)
            for i, x in enumerate(rest)
            if isinstance(x, Spec)
        )
        each = labelled(operands, [rows.result])
        assert each.output is not None
        is_cut = any(isinstance(p, Shard) for p in each.output)
        divisor = math.prod(rows.result.shape) if reduction == MEAN else 1

        def around(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*local: Any) -> Any:
                own = local[: count + len(options)]
                filled = (*own, *(default for _, default in options[len(own) - count :]))
                if reduction == NONE or not is_cut:
                    return function(*filled, reduction)
                return _summed(lambda: function(*filled, SUM), local[:count]) / divisor

            return run

        if reduction == NONE:
            return Outcome(each.inputs, each.output, each.shape, around=around)
        sums = tuple(PARTIAL if isinstance(p, Shard) else p for p in each.output)
        return Outcome(each.inputs, sums, (), around=around)

    plan.__doc__ = f"``{name}({', '.join(tensors)}, ...)``."


def _summed(call: Callable[[], Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """See [Note: empty pieces] in hp_dtensor.no_elements."""
    if all(0 not in x.shape for x in tensors):
        return call()
    platform = get_platform()
    return zeros_from(platform.full((), 0, tensors[0].dtype, platform.device_of(tensors[0])), tensors)


_enter("margin_ranking_loss", ("input1", "input2", "target"), (("margin", 0.0),), _of_elements)
_enter("hinge_embedding_loss", ("input", "target"), (("margin", 1.0),), _of_elements)
_enter(
    "poisson_nll_loss",
    ("input", "target"),
    (("log_input", True), ("full", False), ("eps", 1e-8)),
    _of_elements,
)
_enter("cosine_embedding_loss", ("input1", "input2", "target"), (("margin", 0.0),), _of_vectors_with_targets)
_enter(
    "triplet_margin_loss",
    ("anchor", "positive", "negative"),
    (("margin", 1.0), ("p", 2.0), ("eps", 1e-6), ("swap", False)),
    _of_vectors,
)
_enter(
    "multi_margin_loss",
    ("input", "target"),
    (("p", 1), ("margin", 1.0), ("weight", None)),
    _of_scores,
)
_enter("multilabel_margin_loss", ("input", "target"), (), _of_scores)


@rule(
    "ctc_loss",
    params=(
        "log_probs", "targets", "input_lengths", "target_lengths", ("blank", 0), ("reduction", NONE),
        ("zero_infinity", False),
    ),
)  # fmt: skip
def ctc_loss(
    scores: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = NONE,
    zero_infinity: bool = False,
) -> Outcome:
    """Scores ``(steps, n, classes)``, targets ``(n, longest)``, lengths as tensors ``(n,)``. The batch may be cut.

    The mean divides every loss by its target's length, and by ``n``.
    """
    wanted = "ctc_loss of DTensors takes"
    if not isinstance(scores, Spec) or len(scores.shape) != 3:
        raise ValueError(f"{wanted} scores (steps, batch, classes), got {scores}")
    num = scores.shape[1]
    if not isinstance(targets, Spec) or len(targets.shape) != 2 or targets.shape[0] != num:
        raise ValueError(
            f"{wanted} targets padded to (batch, longest), got {targets}: targets one after the other in a vector cannot be cut"
        )
    if not all(isinstance(x, Spec) and x.shape == (num,) for x in (input_lengths, target_lengths)):
        raise ValueError(f"{wanted} both lengths as tensors of shape ({num},): make tensors of lists")
    operands = [
        Operand(0, scores, ("", "batch", ""), Role.PLAIN),
        Operand(1, targets, ("batch", ""), Role.PLAIN),
        Operand(2, input_lengths, ("batch",), Role.PLAIN),
        Operand(3, target_lengths, ("batch",), Role.PLAIN),
    ]
    each = labelled(operands, [Labelled(("batch",), (num,))])
    assert each.output is not None

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(local: Tensor, *rest: Any) -> Any:
            platform = get_platform()
            own_targets, steps, lengths = rest[:3]
            if 0 in local.shape:
                shape = tuple(lengths.shape) if reduction == NONE else ()
                return zeros_from(platform.zeros(shape, local.dtype, platform.device_of(local)), [local])
            losses = function(local, own_targets, steps, lengths, blank, NONE, zero_infinity)
            if reduction == NONE:
                return losses
            if reduction == MEAN:
                ones = platform.zeros_like(lengths) + 1
                longest = platform.where(lengths > 1, lengths, ones)
                losses = losses / (platform.cast(longest, losses.dtype) * num)
            return platform.sum(losses)

        return run

    if reduction == NONE:
        return Outcome(each.inputs, each.output, each.shape, around=around)
    sums = tuple(PARTIAL if isinstance(p, Shard) else p for p in each.output)
    return Outcome(each.inputs, sums, (), around=around)
