"""Results of an operation on local tensors as DTensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor.errors import name_of
from hp_dtensor.nest import rebuilt
from hp_dtensor.placements import REPLICATE
from hp_dtensor.plan import Plan
from hp_dtensor.rules.registry import Rule
from hp_dtensor.spec import Spec, make_spec
from hp_dtensor.tensor_type import TensorType

_SUBSCRIPT = "getitem"
"""The rule whose results are no views where tensors say which elements are taken."""


def wrapped(result: Any, plan: Plan, rule: Rule, function: Any, of: TensorType) -> Any:
    """What ``plan`` gave, as DTensors where it says so. RuntimeError for a piece of another shape than the plan's."""
    if plan.outputs is not None:
        paired = zip(result, plan.outputs, strict=True)
        return rebuilt(result, [_checked(x, spec, rule, function, of) for x, spec in paired])
    if plan.output is None:
        return result if plan.whole_on is None else _wholes(result, plan.whole_on, of)
    _check_shape(result, plan.output, rule, function)
    return of.wrap(result, plan.spec_of(result))


def as_view(
    result: Any, first: Any, plan: Plan, rule: Rule, function: Any, args: Sequence[Any], tensor_class: Any
) -> Any:
    """Results of an operation whose unsharded results are views. Where they are copies, since pieces moved, they know it."""
    if rule.name == _SUBSCRIPT and sum(isinstance(arg, tensor_class) for arg in args) != 1:
        return result
    source = getattr(first, "_copy_of_view", None)
    for x in result if isinstance(result, (list, tuple)) else (result,):
        if isinstance(x, tensor_class) and x is not first and (source or plan.is_copy):
            x._copy_of_view = source or name_of(function)
    return result


def _wholes(result: Any, mesh: Any, of: TensorType) -> Any:
    """Results that every rank has whole."""
    if isinstance(result, (list, tuple)):
        return rebuilt(result, [_wholes(x, mesh, of) for x in result])
    if not isinstance(result, of.plain):
        return result
    return of.wrap(result, make_spec(mesh, (REPLICATE,) * len(mesh.shape), tuple(result.shape)))


def _checked(x: Any, spec: Spec | None, rule: Rule, function: Any, of: TensorType) -> Any:
    if spec is None:
        return x
    _check_shape(x, spec, rule, function)
    return of.wrap(x, spec)


def _check_shape(result: Any, spec: Spec, rule: Rule, function: Any) -> None:
    if tuple(result.shape) != spec.local_shape:
        raise RuntimeError(
            f"{name_of(function)} gave a local tensor of shape {tuple(result.shape)} where rule {rule.name!r} "
            f"expects {spec.local_shape} (for {spec}): the rule does not fit the function"
        )
