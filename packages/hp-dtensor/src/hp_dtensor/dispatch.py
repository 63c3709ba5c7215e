"""An operation on DTensors: find its plan by function, specs and arguments, make it at the first time, carry it out.

Every framework's adapter catches its functions and calls the function made by :func:`build_dispatch`. Backward then runs at
plain speed: the graph holds local tensors only.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from hp_dtensor import arguments
from hp_dtensor.errors import name_of, refuse_copy_of_view
from hp_dtensor.placements import REPLICATE
from hp_dtensor.plan import Plan, make_plan, position_of, run_plan
from hp_dtensor.redistribution import moves_between, run_moves
from hp_dtensor.rules.registry import Rule
from hp_dtensor.running_module import tell_module
from hp_dtensor.skip_dispatch import is_skipped, on_locals
from hp_dtensor.spec import Spec, make_spec, remember
from hp_platform import _process, get_platform

Tensor = Any
Dispatch = Callable[[Rule, Any, tuple[Any, ...], Mapping[str, Any] | None], Any]
_SCALARS = frozenset({int, float, bool, complex, str, type(None)})
_WRITES_ALL = frozenset({"copy_", "fill_", "zero_"})
"""Rules that write every element, so that the target may lie as it will."""


def build_dispatch(
    tensor_class: Any,
    wrap: Callable[[Tensor, Spec], Any],
    write: Callable[[Tensor, Tensor], Any] | None = None,
) -> Dispatch:
    """``dispatch(rule, function, args, kwargs)`` for a framework whose DTensors are of ``tensor_class``.

    ``write(local, value)`` writes a value into a local tensor, recorded for backward. None where the framework cannot record
    that: then in-place operations on what requires grad are refused, and their in-place kernels are never called.
    """
    plain: Any = get_platform().Tensor

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
        try:
            if (kwargs or rule.binds) and not is_bound:
                if kwargs and kwargs.get("out") is not None:
                    return written_out(rule, function, args, dict(kwargs))
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
                            of_list = local_list(rule, function, arg)
                            if of_list is None:
                                return dispatch(rule, function, adopted(function, args), kwargs, True)
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
                        return dispatch(rule, function, adopted(function, args), kwargs, True)
                key.append(kind)
                if rule.by_value or not (kind in _SCALARS or isinstance(arg, numbers.Number)):
                    key.append(_hashable(rule, function, arg))
                local.append(arg)
            if first is None:
                raise ValueError(
                    f"{name_of(function)} got DTensors inside of a list or by a keyword, where its rule takes none"
                )
            if kwargs:
                if any(isinstance(value, plain) for value in kwargs.values()):
                    kwargs = arguments.with_numbers(function, kwargs)
                key.append(_key_of(rule, function, kwargs))
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
                return as_view(result, first, plan, function, args) if rule.views else result
            if plan.is_simple:
                result = function(*local, **kwargs) if kwargs else function(*local)
                # What changes nothing returns the same object, with the marks that it has.
                if result is first._local and plan.output is first._spec:
                    return first
                result = wrap(result, plan.output)
                if rule.views and getattr(first, "_copy_of_view", None):
                    return as_view(result, first, plan, function, args)
                return result
            if plan.is_direct and not rule.in_place:
                result = plan.run(*local, **kwargs) if kwargs else plan.run(*local)
                if result is first._local and plan.output is first._spec:
                    return first
                result = wrap(result, plan.output if plan.of_truths is None else plan.spec_of(result))
                if rule.views and getattr(first, "_copy_of_view", None):
                    return as_view(result, first, plan, function, args)
                return result
            result = run_on_dtensors(plan, rule, function, args, local, kwargs or {})
            return as_view(result, first, plan, function, args) if rule.views else result
        except Exception as error:
            tell_module(error)
            raise

    def written_out(rule: Rule, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``out=``: the result, written into a tensor that stays as it lies. No gradient is recorded, as of the framework's."""
        out, platform = kwargs.pop("out"), get_platform()
        value = dispatch(rule, function, args, kwargs)
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
        platform.copy_(
            out._local, run_moves(value._local, value._spec, moves_between(value._spec, out._spec))
        )
        return out

    def local_list(rule: Rule, function: Any, arg: tuple[Any, ...]) -> tuple[Any, list[Any]] | None:
        """Key and local values of a list with tensors; None if a plain tensor is among them."""
        key: list[Any] = []
        local: list[Any] = []
        for x in arg:
            if isinstance(x, tensor_class):
                key.append(x._spec)
                local.append(x._local)
            elif isinstance(x, plain):
                return None
            else:
                key.append((type(x), _hashable(rule, function, x)) if rule.by_value else type(x))
                local.append(x)
        return tuple(key), local

    def adopted(function: Any, args: Sequence[Any]) -> tuple[Any, ...]:
        return arguments.adopted(function, args, tensor_class, wrap)

    def run_on_dtensors(
        plan: Plan, rule: Rule, function: Any, args: Any, local: list[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if rule.in_place:
            return write_result(plan, rule, function, args, local, kwargs)
        result = run_plan(plan, function, args, local, kwargs)
        if result is NotImplemented:
            return result
        if plan.outputs is not None:
            return _like(
                result, [_wrapped(x, spec, rule, function, wrap) for x, spec in _paired(result, plan)]
            )
        if plan.output is None:
            return result if plan.whole_on is None else wholes(result, plan.whole_on)
        _check_shape(result, plan.output, rule, function)
        first = args[0]
        if isinstance(first, tensor_class) and result is first._local and plan.output is first._spec:
            return first
        return wrap(result, plan.spec_of(result))

    def as_view(result: Any, first: Any, plan: Plan, function: Any, args: Sequence[Any]) -> Any:
        """Results of an operation whose unsharded results are views. Where they are copies, since pieces moved, they know it."""
        if sum(isinstance(arg, tensor_class) for arg in args) != 1:
            return result
        of = getattr(first, "_copy_of_view", None)
        for x in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(x, tensor_class) and x is not first and (of or plan.is_copy):
                x._copy_of_view = of or name_of(function)
        return result

    def wholes(result: Any, mesh: Any) -> Any:
        """Results that every rank has whole."""
        if isinstance(result, (list, tuple)):
            return _like(result, [wholes(x, mesh) for x in result])
        if not isinstance(result, plain):
            return result
        return wrap(result, make_spec(mesh, (REPLICATE,) * len(mesh.shape), tuple(result.shape)))

    def write_result(
        plan: Plan, rule: Rule, function: Any, args: Any, local: list[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """The operation in place: directly where the target stays as it lies, else by writing the result into it."""
        target = args[0]
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
                check_unrecorded(function, local)
            run_plan(plan, function, args, local, kwargs)  # the rule's own way to write
            return target
        platform: Any = get_platform()
        runs_kernel = plan.run is None and plan.around is None and not (plan.is_empty or plan.meets)
        if stays and write is not None and runs_kernel:
            # A keyword says of a function of new tensors that it shall write.
            kernel: Any = partial(function, inplace=True) if function is functional else function
            run_plan(plan, kernel, args, local, kwargs)
            return target
        records = any(isinstance(x, plain) and platform.requires_grad(x) for x in local)
        if write is not None and plan.run is None and records and platform.is_grad_enabled():
            # Its backward may need what is written over below.
            functional = partial(_of_copy, functional)
        value = run_plan(plan, functional, args, local, kwargs)
        if platform.is_floating(value.dtype) and not platform.is_floating(own.dtype):
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
        check_unrecorded(function, [own, value])
        platform.copy_(own, value)
        return target

    def check_unrecorded(function: Any, tensors: Sequence[Any]) -> None:
        platform = get_platform()
        if platform.is_grad_enabled() and any(
            isinstance(x, plain) and platform.requires_grad(x) for x in tensors
        ):
            raise ValueError(
                f"{platform.platform_type.value} cannot record {name_of(function)} of a DTensor for backward: use the "
                f"operation that makes a new tensor, or no_grad()"
            )

    return dispatch


def _of_copy(functional: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return functional(get_platform().clone(x), *args, **kwargs)


def bound(
    rule: Rule, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments in the one form that rules take."""
    try:
        return rule.bind(args, kwargs)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name_of(function)} of a DTensor: {error}") from error


def _check_shape(result: Any, spec: Spec, rule: Rule, function: Any) -> None:
    if tuple(result.shape) != spec.local_shape:
        raise RuntimeError(
            f"{name_of(function)} gave a local tensor of shape {tuple(result.shape)} where rule {rule.name!r} "
            f"expects {spec.local_shape} (for {spec}): the rule does not fit the function"
        )


def _paired(result: Any, plan: Plan) -> Iterator[tuple[Any, Spec | None]]:
    assert plan.outputs is not None
    return zip(result, plan.outputs, strict=True)


def _wrapped(x: Any, spec: Spec | None, rule: Rule, function: Any, wrap: Any) -> Any:
    if spec is None:
        return x
    _check_shape(x, spec, rule, function)
    return wrap(x, spec)


def _like(result: Any, values: list[Any]) -> Any:
    """``values`` in a container as the framework's function gives it: a tuple, a list or a tuple with names."""
    make = getattr(type(result), "_make", type(result))
    return make(values)


def _key_of(rule: Rule, function: Any, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    key: list[Any] = []
    for name, value in kwargs.items():
        key.extend((name, type(value)))
        if rule.by_value or type(value) not in (int, float):
            key.append(tuple(value) if isinstance(value, list) else _hashable(rule, function, value))
    return tuple(key)


def _hashable(rule: Rule, function: Any, arg: Any) -> Any:
    if type(arg).__hash__ is None:
        raise ValueError(
            f"{name_of(function)} of a DTensor got a {type(arg).__name__}, with which rule {rule.name!r} can do nothing: give "
            f"tensors, numbers or tuples of them"
        )
    return arg
