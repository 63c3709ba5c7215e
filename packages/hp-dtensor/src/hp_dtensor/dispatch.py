"""An operation on DTensors: find its plan by function, specs and arguments, make it at the first time, carry it out.

Every framework's adapter catches its functions and calls the function made by :func:`build_dispatch`. Backward then runs at
plain speed: the graph holds local tensors only.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hp_dtensor import arguments
from hp_dtensor.call_key import bound, hashable, keywords_key, list_key
from hp_dtensor.errors import name_of
from hp_dtensor.in_place import write_out, write_result
from hp_dtensor.plan import Plan, run_plan
from hp_dtensor.plan_making import make_plan
from hp_dtensor.results import as_view, wrapped
from hp_dtensor.rules.registry import Rule
from hp_dtensor.running_module import tell_module
from hp_dtensor.skip_dispatch import is_skipped, on_locals
from hp_dtensor.spec import Spec, remember
from hp_dtensor.tensor_type import TensorType
from hp_platform import _process, get_platform

Tensor = Any
Dispatch = Callable[[Rule, Any, tuple[Any, ...], Mapping[str, Any] | None], Any]
_SCALARS = frozenset({int, float, bool, complex, str, type(None)})


def build_dispatch(
    tensor_class: Any,
    wrap: Callable[[Tensor, Spec], Any],
    write: Callable[[Tensor, Tensor], Any] | None = None,
) -> Dispatch:
    """``dispatch(rule, function, args, kwargs)`` for a framework whose DTensors are of ``tensor_class``.

    ``wrap`` and ``write``: see :class:`hp_dtensor.tensor_type.TensorType`.
    """
    plain: Any = get_platform().Tensor
    of = TensorType(tensor_class, plain, wrap, write)
    modes = _process.open_modes

    def dispatch(
        rule: Rule,
        function: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        is_bound: bool = False,
    ) -> Any:
        if modes.count:
            if is_skipped(function, rule.name):
                return on_locals(function, args, kwargs)
            watcher = _process.spmd_watcher.get()
            if watcher is not None:
                return watcher.run(dispatch, rule, function, args, kwargs)
            losses = _process.parallel_losses.get()
            if losses is not None:
                rule = losses.rule_for(rule, function)
        try:
            if (kwargs or rule.binds) and not is_bound:
                if kwargs and kwargs.get("out") is not None:
                    rest = {name: value for name, value in kwargs.items() if name != "out"}
                    return write_out(
                        kwargs["out"], dispatch(rule, function, args, rest), function, tensor_class
                    )
                args, kwargs = bound(rule, function, args, kwargs or {})
                if kwargs and kwargs.pop("inplace", False):
                    rule = rule.writing(function)
            first: Any = None
            key: list[Any] = [rule]
            local: list[Any] = []
            for arg in args:
                kind = type(arg)
                if kind is tensor_class or isinstance(arg, tensor_class):
                    if first is None:
                        first = arg
                    key.append(arg._spec)
                    local.append(arg._local)
                    continue
                if kind not in _SCALARS:
                    if kind is list or kind is tuple:
                        arg = tuple(arg)
                        for member in arg:
                            if isinstance(member, plain):
                                break
                        else:
                            member = None
                        if member is not None:
                            of_list = list_key(rule, function, arg, of)
                            if of_list is None:
                                return dispatch(rule, function, adopted(rule, function, args), kwargs, True)
                            first = (
                                next(x for x in arg if isinstance(x, tensor_class))
                                if first is None
                                else first
                            )
                            key.append(of_list[0])
                            local.append(of_list[1])
                            continue
                    elif isinstance(arg, plain):
                        if rule.in_place and first is None:  # what is written comes first
                            args = arguments.for_plain_target(function, args, tensor_class)
                            return function(*args, **arguments.with_numbers(function, kwargs or {}))
                        return dispatch(rule, function, adopted(rule, function, args), kwargs, True)
                key.append(kind)
                if rule.by_value or not (kind in _SCALARS or isinstance(arg, numbers.Number)):
                    key.append(hashable(rule, function, arg))
                local.append(arg)
            if first is None:
                raise ValueError(
                    f"{name_of(function)} got DTensors inside of a list or by a keyword, where its rule takes none"
                )
            if kwargs:
                if any(isinstance(value, plain) for value in kwargs.values()):
                    kwargs = arguments.with_numbers(function, kwargs)
                key.append(keywords_key(rule, function, kwargs))
            plans = first._spec.plans
            try:
                plan = plans.get(tuple(key))
            except TypeError as error:  # lists in tuples
                raise ValueError(
                    f"{name_of(function)} of a DTensor got an argument with which rule {rule.name!r} can do nothing: {error}"
                ) from error
            if plan is None:
                if any(x._spec.mesh is not first._spec.mesh for x in arguments.members(args, tensor_class)):
                    return dispatch(
                        rule,
                        function,
                        arguments.on_one_mesh(function, args, tensor_class, wrap),
                        kwargs,
                        True,
                    )
                plan = make_plan(rule, function, args, kwargs or {}, tensor_class)
                result = run_on_dtensors(plan, rule, function, args, local, kwargs or {})
                if result is NotImplemented:
                    return result  # an operator beside what it does not know: Python goes on with the other's
                remember(plans, tuple(key), plan)
                return (
                    as_view(result, first, plan, rule, function, args, tensor_class) if rule.views else result
                )
            if plan.is_simple:
                result = function(*local, **kwargs) if kwargs else function(*local)
                # What changes nothing returns the same object, with the marks that it has.
                if result is first._local and plan.output is first._spec:
                    return first
                result = wrap(result, plan.output)
                if rule.views and getattr(first, "_copy_of_view", None):
                    return as_view(result, first, plan, rule, function, args, tensor_class)
                return result
            if plan.is_direct and not rule.in_place:
                result = plan.run(*local, **kwargs) if kwargs else plan.run(*local)
                if result is first._local and plan.output is first._spec:
                    return first
                result = wrap(result, plan.output if plan.of_truths is None else plan.spec_of(result))
                if rule.views and getattr(first, "_copy_of_view", None):
                    return as_view(result, first, plan, rule, function, args, tensor_class)
                return result
            result = run_on_dtensors(plan, rule, function, args, local, kwargs or {})
            return as_view(result, first, plan, rule, function, args, tensor_class) if rule.views else result
        except Exception as error:
            tell_module(error)
            raise

    def adopted(rule: Rule, function: Any, args: Sequence[Any]) -> tuple[Any, ...]:
        return arguments.adopted(function, args, tensor_class, wrap, writes=rule.in_place)

    def run_on_dtensors(
        plan: Plan, rule: Rule, function: Any, args: Any, local: list[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if rule.in_place:
            return write_result(plan, rule, function, args, local, kwargs, of)
        result = run_plan(plan, function, args, local, kwargs)
        if result is NotImplemented:
            return result
        first = args[0]
        # What changes nothing returns the same object, with the marks that it has.
        if isinstance(first, tensor_class) and result is first._local and plan.output is first._spec:
            return first
        return wrapped(result, plan, rule, function, of)

    return dispatch
