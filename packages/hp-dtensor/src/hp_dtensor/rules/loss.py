"""Losses: elementwise ones, and those of class scores against targets.

Every rank adds up the losses of its part of the batch: a Partial, without communication. A mean divides that by the number
of elements of the whole, or of valid targets on all ranks, since shards may be uneven and targets ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor import across
from hp_dtensor.no_elements import zeros_from
from hp_dtensor.placements import PARTIAL, REPLICATE, Partial, Placement, Shard
from hp_dtensor.rules.choice import Way, choose
from hp_dtensor.rules.elementwise import broadcast_shape, factor_of_one, pointwise
from hp_dtensor.rules.reduction import widened
from hp_dtensor.rules.refusals import refuse_beyond, refused_by_all
from hp_dtensor.rules.registry import REQUIRED, Normalise, Outcome, Placements, rule
from hp_dtensor.spec import Spec
from hp_platform import get_platform

Tensor = Any
Run = Callable[..., Any]


def _bound_by(name: str, params: Sequence[tuple[str, Any]]) -> Normalise:
    """Brings a call into one order: tensors and options as ``params`` names them, without torch's two old switches."""
    canonical = [(n, default) for n, default in params if n not in ("size_average", "reduce")]

    def normalise(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = dict(zip([n for n, _ in params], args, strict=False))
        twice = set(given) & set(kwargs)
        unknown = set(kwargs) - {n for n, _ in params}
        if twice or unknown or len(args) > len(params):
            raise ValueError(f"{name} takes {', '.join(n for n, _ in params)}, each once")
        given.update(kwargs)
        if given.get("size_average") is not None or given.get("reduce") is not None:
            raise ValueError(
                f"{name} takes reduction='none', 'mean' or 'sum' instead of size_average and reduce"
            )
        values = tuple(given.get(n, default) for n, default in canonical)
        if any(value is REQUIRED for value in values):
            raise ValueError(f"{name} needs {' and '.join(n for n, d in canonical if d is REQUIRED)}")
        return values, {}

    return normalise


def _check_reduction(reduction: Any, *more: str) -> None:
    known = ("none", "mean", "sum", *more)
    if reduction not in known:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, known))}, got {reduction!r}")


_OLD = (("size_average", None), ("reduce", None))
_BOTH = (("input", REQUIRED), ("target", REQUIRED))


# ------------------------------------------------------------------------------------------------------------ elementwise
def _elementwise(name: str, params: Sequence[tuple[str, Any]], *more: str) -> None:
    names = [n for n, _ in params if n not in ("size_average", "reduce")]

    @rule(name, params=(), normalise=_bound_by(name, params))
    def plan(*values: Any) -> Outcome:
        given = dict(zip(names, values, strict=True))
        reduction = given["reduction"]
        _check_reduction(reduction, *more)
        if not isinstance(given["target"], Spec):
            raise ValueError(f"the target of {name} is a tensor, got {given['target']!r}")
        is_weighted = given.get("weight") is not None and name in ("mse_loss", "l1_loss", "huber_loss")
        if is_weighted and reduction == "mean":
            raise ValueError(
                f"the mean of {name} with a weight is not built for DTensors: take (weight * {name}(..., reduction='none'))"
                f".sum() / weight.sum()"
            )
        # The cross entropies are linear in their weight, the others give it other places in their formulas.
        carriers = (names.index("weight"),) if name.startswith("binary") else ()
        outcome = pointwise(values, lambda now, args: factor_of_one(now, args, carriers))
        assert outcome.output is not None
        shape = broadcast_shape([x.shape for x in values if isinstance(x, Spec)])
        is_cut = any(isinstance(p, Shard) for p in outcome.output)
        divisor = {"mean": math.prod(shape), "batchmean": shape[0] if shape else 1}.get(reduction)

        def around(function: Run) -> Run:
            def run(*local: Any) -> Any:
                kinds = dict(zip(names, local, strict=True))
                own = {n: v for n, v in kinds.items() if n not in ("input", "target")}
                # What is left out keeps the default of the function, which may not know the option.
                own = {n: v for n, v in own.items() if v is not None}
                call: Run = lambda how: function(kinds["input"], kinds["target"], **{**own, "reduction": how})  # noqa: E731
                if reduction == "none" or not is_cut:
                    return call(reduction)
                return _summed(call, local, divisor)

            def ask(scores: Tensor, **weights: Tensor) -> None:
                function(scores, scores, **weights)

            return refused_by_all(run, ask, names, 1, reduction != "none") if weighted else run

        weighted = any(isinstance(given.get(n), Spec) for n in ("weight", "pos_weight"))
        if reduction == "none":
            return Outcome(outcome.inputs, outcome.output, shape, around=around, meets_others=weighted)
        return Outcome(outcome.inputs, _sums(outcome.output), (), around=around)

    plan.__doc__ = f"``{name}(input, target, ...)``, element by element."


def _sums(each: Placements) -> Placements:
    """How the sum of elements that lie so lies."""
    return tuple(PARTIAL if isinstance(p, Shard) else p for p in each)


def _summed(call: Run, local: Sequence[Any], divisor: Any) -> Tensor:
    """The local sum, divided. See [Note: empty pieces] in hp_dtensor.no_elements."""
    platform = get_platform()
    tensors = [x for x in local if platform.is_tensor(x)]
    if 0 in tensors[0].shape:
        with platform.no_grad():
            dtype = call("sum").dtype  # autocast may say another one than that of the scores
        zero = zeros_from(platform.full((), 0, dtype, platform.device_of(tensors[0])), tensors)
        return zero if divisor is None else platform.cast(zero / divisor, dtype)
    if divisor is None:
        return call("sum")
    if platform.itemsize(tensors[0].dtype) >= 4:
        return call("sum") / divisor
    # In half precision a sum overflows where its mean does not.
    each = call("none")
    return platform.cast(platform.sum(widened(each)) / divisor, each.dtype)


_elementwise("mse_loss", (*_BOTH, *_OLD, ("reduction", "mean"), ("weight", None)))
_elementwise("l1_loss", (*_BOTH, *_OLD, ("reduction", "mean"), ("weight", None)))
_elementwise("smooth_l1_loss", (*_BOTH, *_OLD, ("reduction", "mean"), ("beta", 1.0)))
_elementwise("huber_loss", (*_BOTH, ("reduction", "mean"), ("delta", 1.0), ("weight", None)))
_elementwise("soft_margin_loss", (*_BOTH, *_OLD, ("reduction", "mean")))
_elementwise("binary_cross_entropy", (*_BOTH, ("weight", None), *_OLD, ("reduction", "mean")))
_elementwise(
    "binary_cross_entropy_with_logits",
    (*_BOTH, ("weight", None), *_OLD, ("reduction", "mean"), ("pos_weight", None)),
)
_elementwise("kl_div", (*_BOTH, *_OLD, ("reduction", "mean"), ("log_target", False)), "batchmean")


# ---------------------------------------------------------------------------------------------------------------- classes
@dataclass(frozen=True)
class _Classes:
    """How scores (n, classes, ...) and targets meet."""

    class_dim: int
    is_probabilities: bool
    """Whether the target has a probability for each class, not a class's number."""
    shape: tuple[int, ...]
    """Of the losses, one for each target."""


def _classes(name: str, x: Any, target: Any, weight: Any, may_be_probabilities: bool) -> _Classes:
    if not (isinstance(x, Spec) and isinstance(target, Spec) and x.shape):
        raise ValueError(f"{name} takes scores (n, classes, ...) and targets as tensors")
    class_dim = 0 if len(x.shape) == 1 else 1
    shape = x.shape[:class_dim] + x.shape[class_dim + 1 :]
    is_probabilities = may_be_probabilities and target.shape == x.shape
    if not is_probabilities and target.shape != shape:
        raise ValueError(f"{name} of scores {x.shape} takes targets of shape {shape}, got {target.shape}")
    num_classes = x.shape[class_dim]
    if weight is not None and (not isinstance(weight, Spec) or weight.shape != (num_classes,)):
        raise ValueError(
            f"the weight of {name} has one number for each of {num_classes} classes, got {weight}"
        )
    return _Classes(class_dim, is_probabilities, shape)


def _of_classes(
    found: _Classes, x: Spec, target: Spec, weight: Any, linear_in: Sequence[bool]
) -> tuple[tuple[Any, ...], Placements]:
    """How scores, targets and weights lie, all cut along the same batch dim, and how the losses then do.

    One of those in which the losses are linear may be a sum, beside the others whole; then so are the losses.
    """
    specs = [x, target, weight] if weight is not None else [x, target]
    whole = (REPLICATE,) * len(specs)
    lies: list[list[Placement]] = [[] for _ in specs]
    output: list[Placement] = []
    for mesh_dim in range(len(x.placements)):
        ways = []
        for dim in range(len(x.shape)):
            if dim == found.class_dim:
                continue
            of_loss = Shard(dim - (dim > found.class_dim))
            of_target = Shard(dim) if found.is_probabilities else of_loss
            ways.append(Way((Shard(dim), of_target, *whole[2:]), of_loss))
        for i, (spec, is_linear) in enumerate(zip(specs, linear_in, strict=False)):
            kind = spec.placements[mesh_dim]
            if is_linear and isinstance(kind, Partial):
                ways.append(Way((*whole[:i], kind, *whole[i + 1 :]), kind))
        best = choose(specs, mesh_dim, [*ways, Way(whole, REPLICATE)], math.prod(found.shape))
        output.append(best.output)
        for own, placement in zip(lies, best.inputs, strict=True):
            own.append(placement)
    return tuple(map(tuple, lies)), tuple(output)


def _class_loss(name: str, params: Sequence[tuple[str, Any]], *, may_be_probabilities: bool) -> None:
    names = [n for n, _ in params if n not in ("size_average", "reduce")]

    @rule(name, params=(), normalise=_bound_by(name, params))
    def plan(x: Any, target: Any, weight: Any, *options: Any) -> Outcome:
        given = dict(zip(names[3:], options, strict=True))
        reduction = given["reduction"]
        _check_reduction(reduction)
        found = _classes(name, x, target, weight, may_be_probabilities)
        # A mean over classes divides by the weights, smoothing adds to the probabilities.
        linear_in = (
            not may_be_probabilities,
            found.is_probabilities and not given["label_smoothing"],
            found.is_probabilities or reduction != "mean",
        )
        inputs, each = _of_classes(found, x, target, weight, linear_in)
        mesh_dims = [i for i, p in enumerate(each) if isinstance(p, Shard) and x.mesh.shape[i] > 1]

        def around(function: Run) -> Run:
            def run(scores: Any, targets: Any, weights: Any, *_: Any) -> Any:
                options = {**given, **({} if weights is None else {"weight": weights})}
                call: Run = lambda how: function(scores, targets, **{**options, "reduction": how})  # noqa: E731
                if not mesh_dims or reduction == "none":
                    return call(reduction)
                if reduction == "sum":
                    return _summed(call, (scores,), None)
                if found.is_probabilities:
                    return _summed(call, (scores,), math.prod(found.shape))
                counted = _counted(scores, targets, weights, given["ignore_index"])
                return _summed(call, (scores,), across.reduced(counted, x, mesh_dims, "sum"))

            def ask(scores: Tensor, **weights: Tensor) -> None:
                zero = get_platform().zeros((), "int64", get_platform().device_of(scores))
                function(scores, zero, **weights)

            weighted = weight is not None and not found.is_probabilities
            size = x.shape[found.class_dim]
            return refused_by_all(run, ask, names, size, reduction != "none") if weighted else run

        def look(targets: Tensor) -> None:
            platform: Any = get_platform()
            counted = platform.where(targets == ignored, platform.zeros_like(targets), targets)
            refuse_beyond(counted, x.shape[found.class_dim])

        ignored = given["ignore_index"]
        checks = {} if found.is_probabilities else {1: look}
        output, shape = (each, found.shape) if reduction == "none" else (_sums(each), ())
        meets = reduction == "none" and weight is not None
        return Outcome(inputs, output, shape, around=around, checks=checks, meets_others=meets)

    plan.__doc__ = f"""``{name}(input (n, classes, ...), target, ...)``. Cut classes are joined, cuts of the batch stay.
    Weights, probabilities and the scores of nll_loss may be sums.

    The mean over targets that are classes divides by their number, or the sum of their weights, without the ignored ones:
    where the batch is cut, one all-reduce of that number. A target that is no class is refused by the rank that has it alone
    (of targets that are whole, by all): the others go on, to wait for it at the next collective.
    """


def _counted(scores: Tensor, targets: Tensor, weights: Tensor | None, ignore_index: int) -> Tensor:
    """What a mean divides by, of this rank's targets."""
    platform: Any = get_platform()
    with platform.no_grad():
        is_valid = targets != ignore_index
        # Half precision counts to 65504, or in steps.
        dtype = "float32" if platform.itemsize(scores.dtype) < 4 else platform.dtype_name(scores.dtype)
        counts = platform.cast(is_valid, dtype)
        if 0 in counts.shape:
            return platform.full((), 0, dtype, platform.device_of(scores))
        if weights is not None:
            ids = platform.reshape(platform.where(is_valid, targets, platform.zeros_like(targets)), (-1,))
            rows = platform.embedding(ids, platform.reshape(weights, (-1, 1)))
            counts = counts * platform.cast(platform.reshape(rows, tuple(counts.shape)), dtype)
        return platform.sum(counts)


_class_loss(
    "cross_entropy",
    (
        *_BOTH, ("weight", None), ("size_average", None), ("ignore_index", -100), ("reduce", None),
        ("reduction", "mean"), ("label_smoothing", 0.0),
    ),
    may_be_probabilities=True,
)  # fmt: skip
_class_loss(
    "nll_loss",
    (
        *_BOTH,
        ("weight", None),
        ("size_average", None),
        ("ignore_index", -100),
        ("reduce", None),
        ("reduction", "mean"),
    ),
    may_be_probabilities=False,
)
