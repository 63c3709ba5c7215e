"""How losses on DTensors run inside of ``loss_parallel``: rules that take the place of hp-dtensor's, which join cut classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hp_dtensor import across
from hp_dtensor.errors import name_of
from hp_dtensor.placements import PARTIAL, REPLICATE, Placement, Shard
from hp_dtensor.rules.along import dim_of, lying
from hp_dtensor.rules.registry import Outcome, Rule
from hp_dtensor.rules.softmax import softmax as whole_softmax
from hp_dtensor.spec import Spec, make_spec
from hp_platform import get_platform
from hp_platform.on_platform import once
from hp_tp.loss.classes import cut_of_spec
from hp_tp.loss.cross_entropy import as_rows, reduced, row_losses
from hp_tp.loss.log_softmax import log_softmax, nll_of_rows
from hp_tp.loss.options import check_no_gradient, check_target, checked_options
from hp_tp.loss.rows import refuse_unknown, targets_of

Tensor = Any
Plan = Callable[..., Outcome]
Check = Callable[[str, Spec, int], None]
"""``check(function, logits, class_dim)`` refuses logits with which a block of loss_parallel is not content."""


def parallel_rule(rule: Rule, function: Any, check: Callable[[], Check]) -> Rule:
    """The rule for ``function`` inside of a block, made once; ``rule`` itself where a block changes nothing.

    ``check`` gives the check of the block that is open.
    """
    made = _made()
    key = (rule, rule.name == "softmax" and _is_logarithmic(function))
    found = made.get(key)
    if found is None:
        found = made[key] = _replaced(rule, key[1], check)
        made[(found, key[1])] = found  # a call that is bound comes a second time
    return found


@once
def _made(platform: Any) -> dict[tuple[Rule, bool], Rule]:
    return {}


def _is_logarithmic(function: Any) -> bool:
    """softmax and log_softmax share a rule of hp-dtensor. Of names such as ``log_softmax``, ``special_log_softmax``, ``LogSoftmaxExt``."""
    return "logsoftmax" in name_of(function).replace("_", "").lower()


def _replaced(rule: Rule, is_logarithmic: bool, check: Callable[[], Check]) -> Rule:
    if rule.name == "cross_entropy":
        return replace(rule, plan=_cross_entropy, normalise=_with_check(rule, check))
    if rule.name == "nll_loss":
        return replace(rule, plan=lambda *args: _nll_loss(rule.plan, *args))
    if is_logarithmic:
        return replace(rule, plan=_log_softmax)
    return rule


def _with_check(rule: Rule, check: Callable[[], Check]) -> Any:
    """The call in its one form, and behind it the check of the block that is open: plans of different blocks are told apart."""
    inner = rule.normalise
    assert inner is not None

    def normalise(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given, rest = inner(args, kwargs)
        return (*given, check()), rest

    return normalise


# ---------------------------------------------------------------------------------------------------------------- placing
@dataclass(frozen=True)
class _Placing:
    """How scores, targets, weights and the losses of the rows lie."""

    scores: Spec
    inputs: tuple[Any, ...]
    losses: tuple[Placement, ...]
    shape: tuple[int, ...]
    class_dim: int

    @property
    def row_dims(self) -> tuple[int, ...]:
        """The mesh dims of several ranks along which rows are cut."""
        shape = self.scores.mesh.shape
        return tuple(i for i, p in enumerate(self.losses) if isinstance(p, Shard) and shape[i] > 1)

    def reduced(self, reduction: str) -> tuple[Placement, ...]:
        """How the result lies."""
        if reduction == "none":
            return self.losses
        return tuple(PARTIAL if isinstance(p, Shard) else p for p in self.losses)


def _placing(what: str, x: Any, target: Any, weight: Any, keeps_weight: bool) -> _Placing:
    if not (isinstance(x, Spec) and isinstance(target, Spec) and x.shape):
        raise ValueError(f"{what} takes scores (n, classes, ...) and a target of class numbers, both tensors")
    class_dim = 0 if len(x.shape) == 1 else 1
    shape = x.shape[:class_dim] + x.shape[class_dim + 1 :]
    if target.shape != shape:
        why = ": probabilities are not built for cut classes" if target.shape == x.shape else ""
        raise ValueError(
            f"{what} of scores {x.shape} inside of loss_parallel takes class numbers of shape {shape}, got {target.shape}{why}"
        )
    if weight is not None and (not isinstance(weight, Spec) or weight.shape != (x.shape[class_dim],)):
        raise ValueError(
            f"the weight of {what} has one number for each of {x.shape[class_dim]} classes, got {weight}"
        )
    scores = tuple(own if isinstance(own, Shard) else REPLICATE for own in x.placements)
    rows = tuple(_of_rows(own, class_dim) for own in scores)
    inputs: list[Any] = [scores, rows]
    if weight is not None:
        as_classes = tuple(Shard(0) if own == Shard(class_dim) else REPLICATE for own in scores)
        is_cut_alike = keeps_weight and weight.placements == as_classes
        inputs.append(as_classes if is_cut_alike else (REPLICATE,) * len(scores))
    return _Placing(make_spec(x.mesh, scores, x.shape), tuple(inputs), rows, shape, class_dim)


def _of_rows(own: Placement, class_dim: int) -> Placement:
    """How targets and losses lie where scores lie so."""
    if not isinstance(own, Shard) or own.dim == class_dim:
        return REPLICATE
    return Shard(own.dim - (own.dim > class_dim))


def is_cut_along(x: Any, dim: int) -> bool:
    """Whether a placement cuts this dim."""
    return isinstance(x, Spec) and any(isinstance(p, Shard) and p.dim == dim for p in x.placements)


# ------------------------------------------------------------------------------------------------------------------ rules
def _cross_entropy(
    x: Any, target: Any, weight: Any, ignore_index: Any, reduction: Any, smoothing: Any, check: Check
) -> Outcome:
    """One all-reduce (max) of a number per row, one (sum) of 2 or more; with a mean over cut rows one of a number."""
    placing = _placing("cross_entropy", x, target, weight, True)
    check("cross_entropy", x, placing.class_dim)
    options = checked_options("cross_entropy", reduction, ignore_index, smoothing)
    options = options.with_weight(weight is not None and Shard(0) in placing.inputs[2])
    cut = cut_of_spec(placing.scores, placing.class_dim)

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(scores: Tensor, targets: Tensor, weights: Tensor | None, *_: Any) -> Tensor:
            check_no_gradient("cross_entropy", weights)
            _check_numbers("cross_entropy", targets)
            dtype = _dtype_of_loss(function, scores)
            losses, counts = row_losses(*as_rows(scores, targets), weights, cut, options)
            return _result(losses, counts, placing, options.reduction, tuple(targets.shape), dtype)

        return run

    return _outcome(placing, options.reduction, around, cut.num_classes, options.ignore_index)


def _nll_loss(whole: Plan, x: Any, target: Any, weight: Any, ignore_index: Any, reduction: Any) -> Outcome:
    """One all-reduce of a number per row. As outside of the block where the classes are not cut."""
    if not is_cut_along(x, 0 if isinstance(x, Spec) and len(x.shape) == 1 else 1):
        return whole(x, target, weight, ignore_index, reduction)
    placing = _placing("nll_loss", x, target, weight, False)
    options = checked_options("nll_loss", reduction, ignore_index, 0.0)
    cut = cut_of_spec(placing.scores, placing.class_dim)

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(logs: Tensor, targets: Tensor, weights: Tensor | None, *_: Any) -> Tensor:
            check_no_gradient("nll_loss", weights)
            _check_numbers("nll_loss", targets)
            rows, of_rows = as_rows(logs, targets)
            losses, counts = nll_of_rows(rows, of_rows, weights, cut, options.ignore_index)
            return _result(losses, counts, placing, options.reduction, tuple(targets.shape), logs.dtype)

        return run

    return _outcome(placing, options.reduction, around, cut.num_classes, options.ignore_index)


def _log_softmax(x: Any, dim: Any = -1, *rest: Any, **kwargs: Any) -> Outcome:
    """Two all-reduces of a number per row. As outside of the block where the dim is not cut."""
    dims = dim_of(dim, len(x.shape)) if dim is not None else ()
    if not dims or not is_cut_along(x, dims[0]):
        return whole_softmax(x, dim, *rest, **kwargs)
    lies = lying(x)
    cut = cut_of_spec(make_spec(x.mesh, lies, x.shape), dims[0])

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(local: Tensor, *args: Any, **named: Any) -> Tensor:
            platform = get_platform()
            with platform.no_grad():
                probe = platform.zeros((1,) * max(local.ndim, 1), local.dtype, platform.device_of(local))
                dtype = function(probe, *args, **named).dtype  # an option, or autocast, may say another one
            return log_softmax(platform.cast(local, dtype), dims[0], cut)

        return run

    return Outcome((lies,), lies, x.shape, around=around, meets_others=True)


def _outcome(
    placing: _Placing, reduction: str, around: Callable[..., Any], num_classes: int, ignore_index: int
) -> Outcome:
    def look(targets: Tensor) -> None:
        refuse_unknown(
            targets_of(targets, cut_of_spec(placing.scores, placing.class_dim), ignore_index), num_classes
        )

    shape = placing.shape if reduction == "none" else ()
    return Outcome(
        placing.inputs,
        placing.reduced(reduction),
        shape,
        around=around,
        checks={1: look},
        meets_others=True,
    )


def _check_numbers(what: str, targets: Tensor) -> None:
    check_target(what, targets, tuple(targets.shape), "a loss of cut classes")


def _dtype_of_loss(function: Callable[..., Any], scores: Tensor) -> Any:
    """That of the framework's own: autocast may say another one for 16-bit scores."""
    platform = get_platform()
    if platform.itemsize(scores.dtype) >= 4:
        return scores.dtype
    with platform.no_grad():
        device = platform.device_of(scores)
        return function(
            platform.zeros((1, 1), scores.dtype, device), platform.zeros((1,), "int64", device)
        ).dtype


def _result(
    losses: Tensor, counts: Tensor, placing: _Placing, reduction: str, shape: Sequence[int], dtype: Any
) -> Tensor:
    platform = get_platform()
    count = platform.sum(counts)
    if reduction == "mean":
        count = across.reduced(count, placing.scores, placing.row_dims, "sum")
    return platform.cast(reduced(losses, count, reduction, tuple(shape)), dtype)
