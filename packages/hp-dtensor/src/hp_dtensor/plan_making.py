"""How a plan is made, once per kind of call, from what the rule answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.errors import name_of, shown_specs
from hp_dtensor.placements import Partial, Placement, RaggedShard
from hp_dtensor.plan import InputMove, Place, Plan
from hp_dtensor.redistribution import joined_last, moves_between
from hp_dtensor.rules.registry import Outcome, Rule
from hp_dtensor.rules_view import ask
from hp_dtensor.spec import Spec, local_block, make_spec
from hp_platform import get_platform


def make_plan(
    rule: Rule, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensor_class: Any
) -> Plan:
    """Ask the rule, and plan how its wishes are met. No communication."""

    def spec_of(x: Any) -> Any:
        if isinstance(x, tensor_class):
            return x._spec
        return tuple(map(spec_of, x)) if isinstance(x, (list, tuple)) else x

    given = [spec_of(arg) for arg in args]
    try:
        outcome = ask(rule, given, kwargs)
    except (ValueError, TypeError) as error:
        # Never TypeError: Python would turn it into "unsupported operand".
        raise ValueError(f"{name_of(function)} of {shown_specs(given)}: {error}") from error
    plan = plan_of(outcome, given)
    if plan.meets and (rule.views or (rule.in_place and rule.functional is None)):
        # Linear on every rank; and a view must stay one, as what is written.
        plan = plan_of(outcome, given, meets=False)
    if rule.views and (plan.moves or _makes_summands(plan, given)):
        return replace(plan, is_copy=True, is_direct=False, is_simple=False)
    if not rule.in_place:
        return plan
    # What writes by itself does so also into an empty piece: so the gradient of the value passes on every rank.
    return replace(plan, is_simple=False, is_empty=plan.is_empty and rule.functional is not None)


def _makes_summands(plan: Plan, given: Sequence[Any]) -> bool:
    own = next(arg for arg in given if isinstance(arg, Spec)).placements
    results = [spec for spec in plan.outputs or (plan.output,) if spec is not None]
    return any(
        new.is_partial() and not old.is_partial()
        for spec in results
        for new, old in zip(spec.placements, own, strict=True)
    )


def plan_of(outcome: Outcome, given: Sequence[Any], *, meets: bool | None = None) -> Plan:
    """How what a rule answered for these arguments (with specs for tensors) is carried out.

    ``meets``: see :class:`Plan`; None: where some rank's piece of an argument or of a result has no elements.
    """
    flat = list(with_wishes(given, outcome.inputs))
    mesh = flat[0][1].mesh
    output = None if outcome.output is None else make_spec(mesh, outcome.output, outcome.shape)
    outputs = None
    if outcome.outputs is not None:
        outputs = tuple(
            None if r is None else make_spec(mesh, r.placements, r.shape) for r in outcome.outputs
        )
    results = [spec for spec in outputs or (output,) if spec is not None]
    # An operation that gives no tensor has no gradient.
    differing = {
        dim
        for dim in range(len(mesh.shape))
        if mesh.shape[dim] > 1 and any(not spec.placements[dim].is_replicate() for spec in results)
    }
    pieces = [*results]
    moves: list[InputMove] = []
    marks: list[tuple[Place, tuple[int, ...]]] = []
    for place, spec, wanted in flat:
        if wanted is None:
            continue
        differs = tuple(dim for dim in sorted(differing) if wanted[dim].is_replicate())
        target = make_spec(spec.mesh, wanted, spec.shape)
        pieces.append(target)
        if target is not spec:
            steps = moves_between(spec, target)
            varying = joined_last(steps) & frozenset(differs)
            before = tuple(dim for dim in differs if spec.placements[dim].is_replicate())
            after = tuple(dim for dim in differs if dim not in varying and dim not in before)
            moves.append(InputMove(place, spec, steps, varying, after, before))
        elif differs:
            marks.append((place, differs))
    replaced = tuple(outcome.replaced.items())
    run, prepare, around = outcome.run, outcome.prepare, outcome.around
    is_empty = output is not None and 0 in output.local_shape
    is_empty_here = is_empty and output is not None and 0 not in output.shape
    checks = tuple(
        (place, look)
        for place, spec, wanted in flat
        if isinstance(place, int) and (look := outcome.checks.get(place)) is not None
        if any(map(_is_cut_from_whole, spec.placements, wanted))
    )
    checks_of_empty = tuple(outcome.checks.items()) if is_empty_here and not checks else ()
    is_empty = is_empty and not outcome.meets_others
    if meets is None:
        meets = (
            bool(results)
            and get_platform().supports("double_backward")
            and any(map(_is_empty_somewhere, pieces))
        )
    moved = is_empty or meets or moves or marks or replaced
    is_simple = output is not None and not (moved or run or prepare or around)
    is_direct = output is not None and run is not None and not moved
    return Plan(
        output,
        outputs,
        tuple(moves),
        tuple(marks),
        checks,
        checks_of_empty,
        replaced,
        run,
        prepare,
        around,
        mesh if outcome.is_sized_by_values else None,
        is_empty,
        is_simple,
        is_direct,
        _of_truths(output),
        meets=meets,
    )


def _is_empty_somewhere(spec: Spec) -> bool:
    """Whether a rank has no elements of a tensor that has some. The last ranks have the least."""
    if 0 in spec.shape:
        return False
    ragged = next((p for p in spec.placements if isinstance(p, RaggedShard)), None)
    if ragged is not None:
        return 0 in ragged.local_units
    last = tuple(n - 1 for n in spec.mesh.shape)
    return 0 in local_block(spec.shape, spec.placements, spec.mesh.shape, last)[0]


def _is_cut_from_whole(old: Placement, new: Placement) -> bool:
    return old.is_replicate() and not new.is_replicate()


def _of_truths(output: Spec | None) -> Spec | None:
    if output is None or not any(p.is_partial("sum") for p in output.placements):
        return None
    placements = [Partial("any") if p.is_partial("sum") else p for p in output.placements]
    return make_spec(output.mesh, placements, output.shape)


def with_wishes(given: Sequence[Any], inputs: Sequence[Any]) -> Iterator[tuple[Place, Spec, Any]]:
    """Every spec among the arguments, also in tuples of them, with its place and the placements that are wanted."""
    for position, arg in enumerate(given):
        wish = inputs[position] if position < len(inputs) else None
        if isinstance(arg, Spec):
            yield position, arg, wish
        elif isinstance(arg, tuple):
            for i, member in enumerate(arg):
                if isinstance(member, Spec):
                    yield (position, i), member, None if wish is None else wish[i]
