"""What ``DTensor.redistribute`` does: choose the way, run it now or later, remember what a gathered tensor came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor.across_meshes import check_same_ranks, move_to_mesh
from hp_dtensor.faces import Gathered, trailing_gathers
from hp_dtensor.marks import Marks
from hp_dtensor.placements import REPLICATE
from hp_dtensor.planning import Move
from hp_dtensor.redistribution import moves_between, run_move, start_move
from hp_dtensor.spec import Spec, make_spec
from hp_dtensor.transport import Pending
from hp_platform import get_platform

Tensor = Any


class Redistribution:
    """A redistribution that is under way; :meth:`wait` gives its result."""

    __slots__ = ("_finish", "_result")

    def __init__(self, finish: Any) -> None:
        self._finish = finish
        self._result: Any = None

    def wait(self) -> Any:
        """The DTensor, ready for what the current stream does next. May be called again. All ranks of the mesh call."""
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result


def redistributed(x: Any, mesh: Any, placements: Any, async_op: bool) -> Any:
    """The DTensor ``x`` in other placements, also on another mesh; with ``async_op`` a :class:`Redistribution`.

    [Note: asynchronous] The steps up to the first collective run at once, and that collective is started; the rest follows in
    ``wait()``. Most plans have one collective, which then overlaps with whatever the caller does in between. Backward runs
    its collectives as usual.
    """
    spec: Spec = x._spec
    mesh = spec.mesh if mesh is None or mesh == spec.mesh else mesh
    if mesh is not spec.mesh:
        check_same_ranks(spec.mesh, mesh)
    target = make_spec(mesh, (REPLICATE,) * len(mesh.shape) if placements is None else placements, spec.shape)
    if mesh is not spec.mesh:

        def moved() -> Any:
            return x._wrap(move_to_mesh(x._local, spec, target), target)

        return Redistribution(moved) if async_op else moved()
    if target is spec:
        return Redistribution(lambda: x) if async_op else x
    # What is started where nothing is recorded may end where something is.
    is_recorded = get_platform().requires_grad(x._local) if async_op else records(x._local)
    moves = moves_between(spec, target, is_recorded=is_recorded)
    if not async_op:
        return _finished(x, target, x._local, moves, None)
    local, done = x._local, 0
    pending: Pending | None = None
    while done < len(moves) and pending is None:
        pending = start_move(local, spec, moves[done])
        if pending is None:
            local, done = run_move(local, spec, moves[done]), done + 1
    rest, before = moves[done:], local
    return Redistribution(lambda: _finished(x, target, before, rest, pending))


def _finished(x: Any, target: Spec, local: Tensor, moves: Sequence[Move], pending: Pending | None) -> Any:
    spec: Spec = x._spec
    gathers = trailing_gathers(moves)
    for move in moves[: len(moves) - len(gathers)]:
        local, pending = run_move(local, spec, move, arrived=_arrived(pending)), None
    before = local
    for move in gathers:
        local, pending = run_move(local, spec, move, arrived=_arrived(pending)), None
    result = x._wrap(local, target)
    if gathers and records(local):
        result._marks = Marks(Gathered(before, local, spec, gathers))
    return result


def records(local: Tensor) -> bool:
    """Whether what is done with ``local`` now is recorded for a gradient."""
    platform = get_platform()
    return platform.is_grad_enabled() and platform.requires_grad(local)


def _arrived(pending: Pending | None) -> Any:
    return None if pending is None else (pending.wait(),)
