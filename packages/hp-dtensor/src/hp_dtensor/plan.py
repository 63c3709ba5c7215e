"""What to do when an operation meets DTensors: made once per kind of call from what the rule answers, then carried out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from hp_dtensor.errors import name_of, shown_specs
from hp_dtensor.marks import mark, marked
from hp_dtensor.no_elements import meeting, without_elements
from hp_dtensor.placements import Partial, Placement, RaggedShard
from hp_dtensor.planning import Move
from hp_dtensor.redistribution import joined_last, moves_between, run_moves
from hp_dtensor.rules.registry import Outcome, Rule
from hp_dtensor.rules_view import ask
from hp_dtensor.spec import Spec, local_block, make_spec
from hp_platform import get_platform

Tensor = Any
Place: TypeAlias = "int | tuple[int, int]"
"""Of an argument: its position, or the position of its list and its place in it."""


Checks: TypeAlias = "tuple[tuple[int, Callable[[Tensor], Any]], ...]"


@dataclass(frozen=True)
class InputMove:
    """An argument that must lie otherwise before the operation runs."""

    place: Place
    spec: Spec
    moves: Sequence[Move]
    varying: frozenset[int]
    """Mesh dims along which the operation uses the joined value differently."""
    marks: tuple[int, ...]
    """Mesh dims that need a mark after the move."""
    marks_before: tuple[int, ...]
    """Those that the move leaves Replicate: marked before it, there is less to add up, and other uses share the mark."""

    def equals(self, other: InputMove) -> bool:
        """Whether the same is done to the same kind of tensor."""
        return (self.spec, self.moves, self.varying, self.marks, self.marks_before) == (
            other.spec,
            other.moves,
            other.varying,
            other.marks,
            other.marks_before,
        )


@dataclass(frozen=True)
class Plan:
    """What to do when an operation meets these specs and arguments."""

    output: Spec | None
    """Of the result, if it is one tensor."""
    outputs: tuple[Spec | None, ...] | None
    """Of several results."""
    moves: tuple[InputMove, ...]
    marks: tuple[tuple[Place, tuple[int, ...]], ...]
    """Arguments and the mesh dims along which the operation differs."""
    checks: Checks
    """See :attr:`Outcome.checks`; of tensors that are whole before the moves, on all ranks alike."""
    checks_of_empty: Checks
    """The same, behind the moves, where this rank's result has no elements: of nothing kernels look at no values."""
    replaced: tuple[tuple[int, Any], ...]
    run: Callable[..., Tensor] | None
    prepare: Callable[[list[Any]], list[Any]] | None
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None
    whole_on: Any
    """The mesh on which results of sizes that only the values say are Replicate; None where sizes are known."""
    is_empty: bool
    """Whether this rank's result has no elements."""
    is_simple: bool
    """Whether the operation runs on the local tensors as they are, and gives one tensor."""
    is_direct: bool
    """Whether ``run`` does so in its place."""
    of_truths: Spec | None = None
    """The output's spec for truth values, where ``output`` is a sum. See [Note: sums of truth values]."""
    is_copy: bool = False
    """Whether results that are views in the unsharded program are none here: pieces moved, or ranks hold zeros for a part."""
    meets: bool = False
    """Whether gradients depend on all inputs on every rank. See [Note: derivatives of every order] in no_elements."""

    def spec_of(self, result: Tensor) -> Spec:
        """Of the result, if it is one tensor.

        [Note: sums of truth values] Rules do not know dtypes. Where one of them has every rank give its part among zeros, of
        truth values these are parts of an ``any``, which the ranks can reduce.
        """
        assert self.output is not None
        if self.of_truths is not None and get_platform().dtype_name(result.dtype) == "bool":
            return self.of_truths
        return self.output

    def call(self, function: Callable[..., Any], local: list[Any], kwargs: Mapping[str, Any]) -> Any:
        """The operation on local arguments that lie as it wants them. A plan serves all functions of its rule."""
        if self.run is None and self.prepare is not None:
            local = self.prepare(local)
        run = self.run or (function if self.around is None else self.around(function))
        # See [Note: empty pieces] in hp_dtensor.no_elements.
        result = (without_elements(run) if self.is_empty else run)(*local, **kwargs)
        return meeting(result, local) if self.meets else result


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
    plan = plan_of(outcome, given, function)
    if plan.meets and (rule.views or (rule.in_place and rule.functional is None)):
        # Linear on every rank; and a view must stay one, as what is written.
        plan = plan_of(outcome, given, function, meets=False)
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


def plan_of(outcome: Outcome, given: Sequence[Any], function: Any, *, meets: bool | None = None) -> Plan:
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


def run_plan(
    plan: Plan,
    function: Any,
    args: Sequence[Any],
    local: list[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """On the local tensors ``local`` of ``args``; the list is changed."""
    for position, look in plan.checks:
        look(local[position])
    done: list[tuple[InputMove, Tensor]] = []
    for move in plan.moves:
        # x * x moves x once.
        same = (
            found
            for other, found in done
            if _at(args, other.place) is _at(args, move.place) and other.equals(move)
        )
        moved = next(same, None)
        if moved is None:
            before = move.marks_before
            moved = marked(_at(args, move.place), before) if before else _at(local, move.place)
            moved = run_moves(moved, move.spec, move.moves, move.varying)
            moved = mark(moved, move.spec, move.marks) if move.marks else moved
            done.append((move, moved))
        _put(local, move.place, moved)
    for place, dims in plan.marks:
        _put(local, place, marked(_at(args, place), dims))
    for position, value in plan.replaced:
        local[position] = value
    for position, look in plan.checks_of_empty:
        look(local[position])
    return plan.call(function, local, kwargs)


def _at(args: Sequence[Any], place: Place) -> Any:
    return args[place] if isinstance(place, int) else args[place[0]][place[1]]


def _put(local: list[Any], place: Place, value: Any) -> None:
    if isinstance(place, int):
        local[place] = value
    else:
        local[place[0]][place[1]] = value


def position_of(place: Place) -> int:
    """The position of the argument itself."""
    return place if isinstance(place, int) else place[0]
