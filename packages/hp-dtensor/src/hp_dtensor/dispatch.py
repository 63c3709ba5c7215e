"""An operation on DTensors: find its plan by function, specs and arguments, make it at the first time, carry it out.

Every framework's adapter catches its functions and calls the function made by :func:`build_dispatch`. Backward then runs at
plain speed: the graph holds local tensors only.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.empty import without_elements
from hp_dtensor.marks import mark, marked
from hp_dtensor.placements import REPLICATE
from hp_dtensor.redistribution import Move, plan_moves, run_moves
from hp_dtensor.rules.registry import Rule
from hp_dtensor.spec import Spec, make_spec
from hp_platform import get_platform

Tensor = Any
Dispatch = Callable[[Rule, Any, tuple[Any, ...], Mapping[str, Any] | None], Any]

_SCALARS = frozenset({int, float, bool, complex, str, type(None)})


@dataclass(frozen=True)
class InputMove:
    """An argument that must lie otherwise before the operation runs."""

    position: int
    spec: Spec
    moves: Sequence[Move]
    varying: frozenset[int]
    """Mesh dims along which the operation uses the joined value differently."""
    marks: tuple[int, ...]
    """Mesh dims that need a mark after the move."""

    def equals(self, other: InputMove) -> bool:
        """Whether the same is done to the same kind of tensor."""
        return (self.spec, self.moves, self.varying, self.marks) == (
            other.spec,
            other.moves,
            other.varying,
            other.marks,
        )


@dataclass(frozen=True)
class Plan:
    """What to do when an operation meets these specs and arguments."""

    output: Spec
    moves: tuple[InputMove, ...]
    marks: tuple[tuple[int, tuple[int, ...]], ...]
    """Argument positions and the mesh dims along which the operation differs."""
    replaced: tuple[tuple[int, Any], ...]
    run: Callable[..., Tensor] | None
    is_simple: bool
    """Whether the operation runs on the local tensors as they are."""


def build_dispatch(tensor_class: Any, wrap: Callable[[Tensor, Spec], Any]) -> Dispatch:
    """``dispatch(rule, function, args, kwargs)`` for a framework whose DTensors are of ``tensor_class``."""
    plain: Any = get_platform().Tensor

    def dispatch(rule: Rule, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
        if kwargs or rule.packs is not None:
            args, kwargs = rule.bind(args, kwargs or {})
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
                if kind is list:
                    arg = tuple(arg)
                elif isinstance(arg, plain):
                    return dispatch(rule, function, _adopted(function, args, tensor_class, wrap), kwargs)
            key.append(kind)
            if rule.by_value or not (kind in _SCALARS or isinstance(arg, numbers.Number)):
                key.append(_hashable(rule, function, arg))
            local.append(arg)
        if first is None:
            raise ValueError(
                f"{name_of(function)} got DTensors inside of a list or by a keyword, where its rule takes none"
            )
        if kwargs:
            key.append(_key_of(function, kwargs, plain))
        plans = first._spec.plans
        plan = plans.get(tuple(key))
        if plan is None:
            specs = [arg._spec for arg in args if isinstance(arg, tensor_class)]
            if any(spec.mesh is not specs[0].mesh for spec in specs):
                return dispatch(rule, function, _on_one_mesh(function, args, tensor_class, wrap), kwargs)
            plan = make_plan(rule, function, args, kwargs or {}, tensor_class)
            result = _run(plan, function, args, local, kwargs or {})
            if tuple(result.shape) != plan.output.local_shape:
                raise RuntimeError(
                    f"{name_of(function)} gave a local tensor of shape {tuple(result.shape)} where rule {rule.name!r} "
                    f"expects {plan.output.local_shape} (for {plan.output}): the rule does not fit the function"
                )
            plans[tuple(key)] = plan
        elif plan.is_simple:
            result = function(*local, **kwargs) if kwargs else function(*local)
        else:
            result = _run(plan, function, args, local, kwargs or {})
        # What changes nothing returns the same object, with the marks that it has.
        return first if result is first._local and plan.output is first._spec else wrap(result, plan.output)

    return dispatch


def make_plan(
    rule: Rule, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensor_class: Any
) -> Plan:
    """Ask the rule, and plan how its wishes are met. No communication."""
    given = [arg._spec if isinstance(arg, tensor_class) else arg for arg in args]
    try:
        outcome = rule.plan(*given, **kwargs)
    except (ValueError, TypeError) as error:
        # Never TypeError: Python would turn it into "unsupported operand".
        raise ValueError(f"{name_of(function)} of {shown_specs(given)}: {error}") from error
    mesh = next(spec for spec in given if isinstance(spec, Spec)).mesh
    output = make_spec(mesh, outcome.output, outcome.shape)
    moves: list[InputMove] = []
    marks: list[tuple[int, tuple[int, ...]]] = []
    for position, (spec, wanted) in enumerate(zip(given, outcome.inputs, strict=False)):
        if not isinstance(spec, Spec) or wanted is None:
            continue
        differs = tuple(
            dim
            for dim, placement in enumerate(wanted)
            if placement.is_replicate() and not outcome.output[dim].is_replicate() and mesh.shape[dim] > 1
        )
        if wanted != spec.placements:
            varying = frozenset(dim for dim in differs if spec.placements[dim].is_shard())
            steps = plan_moves(spec.placements, wanted)
            rest = tuple(dim for dim in differs if dim not in varying)
            moves.append(InputMove(position, spec, steps, varying, rest))
        elif differs:
            marks.append((position, differs))
    replaced = tuple(outcome.replaced.items())
    run = outcome.run
    if 0 in output.local_shape:  # see [Note: empty pieces] in hp_dtensor.empty
        run = without_elements(run or function)
    is_simple = not (moves or marks or replaced or run)
    return Plan(output, tuple(moves), tuple(marks), replaced, run, is_simple)


def _run(
    plan: Plan, function: Any, args: Sequence[Any], local: list[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    done: list[tuple[InputMove, Tensor]] = []
    for move in plan.moves:
        # x * x moves x once.
        same = (
            found
            for other, found in done
            if args[other.position] is args[move.position] and other.equals(move)
        )
        moved = next(same, None)
        if moved is None:
            moved = run_moves(local[move.position], move.spec, move.moves, move.varying)
            moved = mark(moved, move.spec, move.marks) if move.marks else moved
            done.append((move, moved))
        local[move.position] = moved
    for position, dims in plan.marks:
        local[position] = marked(args[position], dims)
    for position, value in plan.replaced:
        local[position] = value
    return (plan.run or function)(*local, **kwargs)


def _adopted(function: Any, args: Sequence[Any], tensor_class: Any, wrap: Any) -> tuple[Any, ...]:
    """Plain tensors beside DTensors count as replicated: constants such as a table of positions, equal on all ranks."""
    platform = get_platform()
    meshes = [arg._spec.mesh for arg in args if isinstance(arg, tensor_class)]
    if not meshes:
        raise ValueError(
            f"{name_of(function)} got DTensors inside of a list or by a keyword, where its rule takes none"
        )
    adopted: list[Any] = []
    for position, arg in enumerate(args):
        if isinstance(arg, tensor_class) or not platform.is_tensor(arg):
            adopted.append(arg)
        elif platform.requires_grad(arg):
            raise ValueError(
                f"argument {position} of {name_of(function)} is a plain tensor of shape {tuple(arg.shape)} that requires "
                f"grad, beside a DTensor: say how it lies, with DTensor.from_local(x, mesh, [Replicate(), ...]) or "
                f"distribute_tensor"
            )
        else:
            placements = (REPLICATE,) * len(meshes[0].shape)
            adopted.append(wrap(arg, make_spec(meshes[0], placements, tuple(arg.shape))))
    return tuple(adopted)


def _on_one_mesh(function: Any, args: Sequence[Any], tensor_class: Any, wrap: Any) -> tuple[Any, ...]:
    """Meshes that are equal but not one object count as one; others are refused."""
    mesh = next(arg._spec.mesh for arg in args if isinstance(arg, tensor_class))
    moved: list[Any] = []
    for arg in args:
        if isinstance(arg, tensor_class):
            spec = arg._spec
            if spec.mesh != mesh:
                raise ValueError(
                    f"{name_of(function)} got DTensors on two meshes, {mesh} and {spec.mesh}: bring them to one mesh, "
                    f"for example with DTensor.from_local(x.full_tensor(), mesh, [Replicate(), ...])"
                )
            if spec.mesh is not mesh:
                arg = wrap(arg._local, make_spec(mesh, spec.placements, spec.shape))
        moved.append(arg)
    return tuple(moved)


def _key_of(function: Any, kwargs: Mapping[str, Any], plain: Any) -> tuple[Any, ...]:
    for name, value in kwargs.items():
        if isinstance(value, plain):
            raise ValueError(
                f"{name_of(function)} of a DTensor takes no tensor for its argument {name!r}: give it by position, or leave "
                f"it out"
            )
    return tuple((n, type(v)) if type(v) in (int, float) else (n, type(v), v) for n, v in kwargs.items())


def _hashable(rule: Rule, function: Any, arg: Any) -> Any:
    if type(arg).__hash__ is None:
        raise ValueError(
            f"{name_of(function)} of a DTensor got a {type(arg).__name__}, with which rule {rule.name!r} can do nothing: give "
            f"tensors, numbers or tuples of them"
        )
    return arg


def name_of(function: Any) -> str:
    """The name of a framework's function, for messages."""
    names = (getattr(function, attribute, None) for attribute in ("__qualname__", "__name__", "name"))
    return next((name for name in names if isinstance(name, str)), str(function))


def shown_specs(given: Sequence[Any]) -> str:
    """For messages: the specs among the arguments."""
    return ", ".join(repr(arg) for arg in given if isinstance(arg, Spec)) or "DTensors"


def no_rule(name: str, specs: Sequence[Any]) -> NotImplementedError:
    """The error for an operation of the framework that no rule knows; it never runs on shards instead."""
    platform = get_platform()
    return NotImplementedError(
        f"{platform.platform_type.value} {platform.framework_version}: {name} has no rule for DTensors; got "
        f"{shown_specs(specs)}. Ways out: x.full_tensor() to work on the whole tensor, x.to_local() to work on this rank's "
        f"piece and DTensor.from_local() for the result, or a rule of your own (hp_dtensor.rules.rule)"
    )
