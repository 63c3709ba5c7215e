"""What to do when an operation meets DTensors, and how it is carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hp_dtensor.marks import mark, marked
from hp_dtensor.no_elements import meeting, without_elements
from hp_dtensor.planning import Move
from hp_dtensor.redistribution import run_moves
from hp_dtensor.spec import Spec
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
