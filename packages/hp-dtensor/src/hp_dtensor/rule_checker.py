"""Checks a rule in one process: cut the inputs for every rank, run each rank's local operation, put the results together.

Values and gradients must be those of the unsharded operation. Redistribution is not run here: inputs are cut as the rule
wants them, and gradients are put together as :mod:`hp_dtensor.conversions` counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_dtensor.pieces import Coordinate, assembled, coordinates, piece, seeds, whole_gradient
from hp_dtensor.placements import REPLICATE, Placement
from hp_dtensor.plan import Plan
from hp_dtensor.plan_making import plan_of, with_wishes
from hp_dtensor.rules import RULES
from hp_dtensor.rules.registry import Outcome, Placements
from hp_dtensor.rules_view import ask
from hp_dtensor.same_program import program
from hp_dtensor.simulation import CheckerMesh, Replies
from hp_dtensor.spec import Spec, make_spec, shown
from hp_dtensor.whole_call import gradients, leaf, results_of, seed, tensors_of, with_tensors
from hp_platform import get_platform

__all__ = ["CheckerMesh", "RefusedError", "RuleChecker", "assembled", "check_rule", "piece"]

Tensor = Any


class RefusedError(ValueError):
    """The rule refuses these placements, on all ranks, with the ValueError that is this one's cause."""


def check_rule(
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    placements: Sequence[Sequence[Placement]],
    mesh_shape: tuple[int, ...],
    *,
    kwargs: Mapping[str, Any] | None = None,
    tolerance: float,
) -> Outcome:
    """Check rule ``name`` for ``function(*args, **kwargs)`` in one combination of placements: see :class:`RuleChecker`.

    Returns what the rule answered on the first rank. Communication: none.
    """
    return RuleChecker(name, function, args, mesh_shape, kwargs=kwargs, tolerance=tolerance).check(placements)


@dataclass
class _Rank:
    """What one rank gets."""

    coordinate: Coordinate
    outcome: Outcome
    given: tuple[Any, ...]
    """The arguments, with specs for tensors, in the form that the rule takes."""
    kwargs: dict[str, Any]
    wanted: list[Placements]
    """How each input lies when the operation runs."""
    wishes: list[Placements | None]
    """Where the rule asks for that: there the gradients of what is Replicate are summed."""
    specs: list[Spec | None] = field(default_factory=list)
    """Of the results."""
    pieces: list[Tensor] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    grads: list[Tensor | None] = field(default_factory=list)


class RuleChecker:
    """Checks rule ``name`` for ``function(*args, **kwargs)`` on a mesh of this shape, in many combinations of placements.

    The unsharded operation runs once, and so does each program that the rule makes of a combination:
    see [Note: the same program] in :mod:`hp_dtensor.same_program`.

    Args:
        name: of a rule in :data:`hp_dtensor.rules.RULES`.
        function: works on plain tensors of the process' framework; gives a tensor, several in a tuple or list, or a value.
        args: positional arguments of a call; tensors (also those in lists) are whole, those of a floating dtype are
            differentiated. The rule brings them into its own form, as in dispatch.
        mesh_shape: how many ranks along each mesh dim.
        kwargs: scalars.
        tolerance: largest absolute difference of values and gradients that is allowed.

    Collectives that the rule's own ``run`` starts are simulated: see [Note: replies] in :mod:`hp_dtensor.simulation`.
    """

    programs: int
    """How many different programs have run."""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        mesh_shape: tuple[int, ...],
        *,
        kwargs: Mapping[str, Any] | None = None,
        tolerance: float,
    ) -> None:
        self.name, self.function, self.args, self.mesh_shape = name, function, args, mesh_shape
        self.kwargs, self.tolerance = dict(kwargs or {}), tolerance
        self.tensors = list(tensors_of(args))
        self.programs = 0
        self._passed: set[Hashable] = set()
        self._replies = Replies()
        self._meshes = {c: CheckerMesh(mesh_shape, c, self._replies) for c in coordinates(mesh_shape)}
        with get_platform().enable_grad():
            leaves = [leaf(x) for x in self.tensors]
            whole = results_of(function(*with_tensors(args, leaves), **self.kwargs))
            self._seeds = [seed(x) for x in whole]
            self._gradients = gradients(whole, leaves, self._seeds)
            self._whole = [get_platform().detach(x) if get_platform().is_tensor(x) else x for x in whole]

    def check(self, placements: Sequence[Sequence[Placement]]) -> Outcome:
        """Check one combination: for each tensor among ``args``, in their order, how it lies.

        Returns what the rule answered on the first rank. RefusedError if the rule refuses these placements on all ranks.
        AssertionError, with rule, placements and mesh, if a value or gradient differs, a local shape is not that of the
        output's spec, or ranks get different answers. Communication: none.
        """
        label = f"rule {self.name!r} of {', '.join(map(shown, placements))} on mesh {self.mesh_shape}"
        ranks = self._answers(placements, label)
        first = ranks[0].outcome
        same = self._program(ranks)
        if same not in self._passed:
            with get_platform().enable_grad():
                self._run(ranks, label)
            self._compare(ranks, label)
            self._passed.add(same)
            self.programs = self.programs + 1
        return first

    # ------------------------------------------------------------------------------------------------- what the rule says
    def _answers(self, placements: Sequence[Sequence[Placement]], label: str) -> list[_Rank]:
        self._replies.clear()
        ranks, refusals = [], []
        for coordinate in self._meshes:
            try:
                ranks.append(self._answer(coordinate, placements))
            except ValueError as error:
                refusals.append(error)
        if refusals:
            assert not ranks, f"{label}: {len(refusals)} ranks refuse, {len(ranks)} do not: {refusals[0]}"
            raise RefusedError(f"{label}: refused") from refusals[0]
        first = ranks[0].outcome
        for rank in ranks[1:]:
            same = _alike(rank.outcome) == _alike(first)
            assert same, f"{label}: ranks get different answers: {first} and {rank.outcome}"
        return ranks

    def _answer(self, coordinate: Coordinate, placements: Sequence[Sequence[Placement]]) -> _Rank:
        mesh = self._meshes[coordinate]
        specs = [make_spec(mesh, p, tuple(x.shape)) for x, p in zip(self.tensors, placements, strict=True)]
        given, kwargs = self._bound(specs)
        outcome = ask(RULES[self.name], given, kwargs)
        flat = list(with_wishes(given, outcome.inputs))
        wanted = [wish or spec.placements for _, spec, wish in flat]
        return _Rank(coordinate, outcome, given, kwargs, wanted, [wish for _, _, wish in flat])

    def _bound(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with other values in the places of the tensors, in the form that the rule takes."""
        rule, args = RULES[self.name], with_tensors(self.args, tensors)
        return rule.bind(args, self.kwargs) if self.kwargs or rule.binds else (args, {})

    def _program(self, ranks: Sequence[_Rank]) -> Hashable:
        """What decides about values and gradients; two combinations with equal ones need one run."""
        first = ranks[0]
        own = []
        for rank in ranks:
            told = rank.outcome
            own.append(
                (program(told.replaced), program(told.run), program(told.prepare), program(told.around))
            )
        told = first.outcome
        results = told.output, told.shape, told.outputs, told.is_sized_by_values
        return tuple(first.wanted), tuple(wish is None for wish in first.wishes), results, tuple(own)

    # --------------------------------------------------------------------------------------------------- what the ranks do
    def _run(self, ranks: Sequence[_Rank], label: str) -> None:
        """Forward and backward on every rank, as often as collectives need it."""
        while True:
            for rank in ranks:
                self._forward(rank, label)
            self._backward(ranks, label)
            if self._replies.settle(self.mesh_shape):
                return

    def _forward(self, rank: _Rank, label: str) -> None:
        plan = plan_of(rank.outcome, rank.given)
        rank.pieces = [
            leaf(piece(x, p, self.mesh_shape, rank.coordinate))
            for x, p in zip(self.tensors, rank.wanted, strict=True)
        ]
        local = [list(x) if isinstance(x, tuple) else x for x in self._bound(rank.pieces)[0]]
        for position, value in plan.replaced:
            local[position] = value
        rank.results = results_of(plan.call(self.function, local, rank.kwargs))
        rank.specs = _specs_of_results(plan, rank.results)
        assert len(rank.results) == len(rank.specs), (
            f"{label}: {len(rank.results)} results, the rule says {len(rank.specs)}"
        )
        for result, spec in zip(rank.results, rank.specs, strict=True):
            assert spec is None or tuple(result.shape) == spec.local_shape, (
                f"{label} at {rank.coordinate}: the local result has shape {tuple(result.shape)}, "
                f"its spec {spec.local_shape}"
            )

    def _backward(self, ranks: Sequence[_Rank], label: str) -> None:
        platform = get_platform()
        of_ranks: dict[Coordinate, list[Tensor | None]] = {rank.coordinate: [] for rank in ranks}
        for i, of_whole in enumerate(self._seeds):
            spec = ranks[0].specs[i]
            parts: dict[Coordinate, Any] = {}
            if of_whole is not None:
                assert spec is not None, (
                    f"{label}: result {i} has a gradient, but the rule knows no spec of it"
                )
                values = {rank.coordinate: platform.to_numpy(rank.results[i]) for rank in ranks}
                parts = seeds(platform.to_numpy(of_whole), values, spec.placements)
            for rank in ranks:
                of_rank = None
                if of_whole is not None:
                    g = parts[rank.coordinate].reshape(rank.results[i].shape)
                    of_rank = platform.tensor(g, of_whole.dtype, platform.device_of(of_whole))
                of_ranks[rank.coordinate].append(of_rank)
        for rank in ranks:
            rank.grads = gradients(rank.results, rank.pieces, of_ranks[rank.coordinate])

    # --------------------------------------------------------------------------------------------------------- put together
    def _compare(self, ranks: Sequence[_Rank], label: str) -> None:
        for i, value in enumerate(self._whole):
            place = f"{label}: value" + (f" {i}" if len(self._whole) > 1 else "")
            spec = ranks[0].specs[i]
            if spec is None:
                found = [rank.results[i] for rank in ranks]
                assert all(x == value for x in found), f"{place}: {found}, expected {value}"
            else:
                pieces = {rank.coordinate: rank.results[i] for rank in ranks}
                self._compare_one(assembled(pieces, spec.placements, place), value, place)
        for i, grad in enumerate(self._gradients):
            if grad is not None:
                place = f"{label}: gradient of tensor {i}"
                self._compare_one(self._gradient(ranks, i, place), grad, place)

    def _gradient(self, ranks: Sequence[_Rank], i: int, label: str) -> Any:
        to_numpy, first = get_platform().to_numpy, ranks[0]
        differing = {
            dim
            for dim, num_ranks in enumerate(self.mesh_shape)
            if num_ranks > 1
            and any(spec is not None and not spec.placements[dim].is_replicate() for spec in first.specs)
        }
        wish = first.wishes[i]
        marked = frozenset(dim for dim in differing if wish is not None and wish[dim].is_replicate())
        values = {rank.coordinate: to_numpy(rank.pieces[i]) for rank in ranks}
        grads = {rank.coordinate: to_numpy(rank.grads[i]) for rank in ranks}
        return whole_gradient(grads, values, first.wanted[i], marked, label)

    def _compare_one(self, found: Any, expected: Tensor, label: str) -> None:
        import numpy as np

        wanted = get_platform().to_numpy(expected)
        assert found.shape == wanted.shape, f"{label}: shape {found.shape}, expected {wanted.shape}"
        np.testing.assert_allclose(found, wanted, rtol=0, atol=self.tolerance, err_msg=label)


def _alike(outcome: Outcome) -> tuple[Any, ...]:
    return outcome.inputs, outcome.output, outcome.shape, outcome.outputs


def _specs_of_results(plan: Plan, results: Sequence[Any]) -> list[Spec | None]:
    if plan.whole_on is not None:
        whole = (REPLICATE,) * len(plan.whole_on.shape)
        return [
            make_spec(plan.whole_on, whole, tuple(x.shape)) if get_platform().is_tensor(x) else None
            for x in results
        ]
    return list(plan.outputs) if plan.outputs is not None else [plan.output]
