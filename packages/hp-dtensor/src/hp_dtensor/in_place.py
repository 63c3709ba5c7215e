"""Operations that write: in place, and with ``out=``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hp_dtensor.errors import name_of, refuse_copy_of_view
from hp_dtensor.no_elements import has_gradients, is_complex
from hp_dtensor.plan import Plan, position_of, run_plan
from hp_dtensor.redistribution import moves_between, run_moves
from hp_dtensor.rules.registry import Rule
from hp_dtensor.tensor_type import TensorType
from hp_platform import get_platform

Tensor = Any
_WRITES_ALL = frozenset({"copy_", "fill_", "zero_"})
"""Rules that write every element, so that the target may lie as it will."""


def write_result(
    plan: Plan,
    rule: Rule,
    function: Any,
    args: Sequence[Any],
    local: list[Any],
    kwargs: Mapping[str, Any],
    of: TensorType,
) -> Any:
    """The operation in place: directly where the target stays as it lies, else by writing the result into it."""
    target, write = args[0], of.write
    spec, own = target._spec, target._local
    refuse_copy_of_view(target, name_of(function))
    assert plan.output is not None, f"rule {rule.name!r} of an in-place operation gives one tensor"
    if plan.output.shape != spec.shape:
        raise ValueError(
            f"{name_of(function)} would change the shape of the tensor that it writes from {spec.shape} to "
            f"{plan.output.shape}: use the operation that makes a new tensor"
        )
    stays = plan.output is spec and not any(position_of(move.place) == 0 for move in plan.moves)
    functional: Any = rule.functional
    if functional is None and not stays and rule.name in _WRITES_ALL:
        functional = function  # on a copy that lies as the rule wants it
    if functional is None:
        if not stays:
            raise ValueError(
                f"{name_of(function)} cannot write into a tensor that lies as {spec.placements}: redistribute it to "
                f"{plan.output.placements} first"
            )
        if write is None:
            _check_unrecorded(function, local, of.plain)
        run_plan(plan, function, args, local, kwargs)  # the rule's own way to write
        return target
    platform: Any = get_platform()
    runs_kernel = plan.run is None and plan.around is None and not (plan.is_empty or plan.meets)
    if stays and write is not None and runs_kernel:
        # A keyword says of a function of new tensors that it shall write.
        kernel: Any = partial(function, inplace=True) if function is functional else function
        run_plan(plan, kernel, args, local, kwargs)
        return target
    records = any(isinstance(x, of.plain) and platform.requires_grad(x) for x in local)
    if write is not None and plan.run is None and records and platform.is_grad_enabled():
        # Its backward may need what is written over below.
        functional = partial(_of_copy, functional)
    value = run_plan(plan, functional, args, local, kwargs)
    if (has_gradients(value) and not has_gradients(own)) or (is_complex(value) and not is_complex(own)):
        raise ValueError(
            f"{name_of(function)} cannot write {platform.dtype_name(value.dtype)} into a tensor of "
            f"{platform.dtype_name(own.dtype)}: cast one of them"
        )
    if plan.output is not spec:
        value = value if value.dtype == own.dtype else platform.cast(value, own.dtype)
        value = run_moves(value, plan.output, moves_between(plan.output, spec))
    if write is not None:
        write(own, value)
        return target
    _check_unrecorded(function, [own, value], of.plain)
    platform.copy_(own, value)
    return target


def write_out(out: Any, value: Any, function: Any, tensor_class: Any) -> Any:
    """``out=``: the result, written into a tensor that stays as it lies. No gradient is recorded, as of the framework's."""
    platform = get_platform()
    if not (
        isinstance(out, tensor_class)
        and isinstance(value, tensor_class)
        and out._spec.shape == value._spec.shape
    ):
        raise ValueError(
            f"out= of {name_of(function)} must be a DTensor of the result's shape, got {type(out).__name__} of shape "
            f"{tuple(getattr(out, 'shape', ()))}: use the result"
        )
    if platform.is_grad_enabled() and any(platform.requires_grad(x._local) for x in (out, value)):
        raise ValueError(f"out= of {name_of(function)} records no gradient: use the result, or no_grad()")
    if out._local.dtype != value._local.dtype:
        raise ValueError(
            f"out= of {name_of(function)} has dtype {platform.dtype_name(out._local.dtype)}, the result "
            f"{platform.dtype_name(value._local.dtype)}: they must be equal"
        )
    platform.copy_(out._local, run_moves(value._local, value._spec, moves_between(value._spec, out._spec)))
    return out


def _check_unrecorded(function: Any, tensors: Sequence[Any], plain: Any) -> None:
    platform = get_platform()
    if platform.is_grad_enabled() and any(
        isinstance(x, plain) and platform.requires_grad(x) for x in tensors
    ):
        raise ValueError(
            f"{platform.platform_type.value} cannot record {name_of(function)} of a DTensor for backward: use the "
            f"operation that makes a new tensor, or no_grad()"
        )


def _of_copy(functional: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return functional(get_platform().clone(x), *args, **kwargs)
