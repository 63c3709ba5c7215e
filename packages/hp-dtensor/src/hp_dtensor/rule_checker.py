"""Checks a rule in one process: cut the inputs for every rank, run each rank's local operation, put the results together.

Values and gradients must be those of the unsharded operation. Redistribution is not run here: inputs are cut as the rule
wants them, and gradients are put together as :mod:`hp_dtensor.conversions` counts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hp_dtensor.pieces import Coordinate, assembled, coordinates, piece, seeds, whole_gradient
from hp_dtensor.placements import REPLICATE, Placement
from hp_dtensor.plan import Plan, plan_of, with_wishes
from hp_dtensor.rules import RULES
from hp_dtensor.rules.registry import Outcome, Placements
from hp_dtensor.rules_view import ask
from hp_dtensor.simulation import CheckerMesh, Replies
from hp_dtensor.spec import Spec, make_spec, shown
from hp_platform import get_platform

__all__ = ["CheckerMesh", "assembled", "check_rule", "piece"]

Tensor = Any


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
    """Check rule ``name`` for ``function(*args, **kwargs)`` on a mesh of this shape.

    Args:
        name: of a rule in :data:`hp_dtensor.rules.RULES`.
        function: works on plain tensors of the process' framework; gives a tensor, several in a tuple or list, or a value.
        args: positional arguments of a call; tensors (also those in lists) are whole, those of a floating dtype are
            differentiated. The rule brings them into its own form, as in dispatch.
        placements: for each tensor among ``args``, in their order.
        mesh_shape: how many ranks along each mesh dim.
        kwargs: scalars.
        tolerance: largest absolute difference of values and gradients that is allowed.

    Collectives that the rule's own ``run`` starts are simulated: see [Note: replies] in :mod:`hp_dtensor.simulation`.

    Returns what the rule answered on the first rank. AssertionError, with rule, placements and mesh, if a value or gradient
    differs, a local shape is not that of the output's spec, or ranks get different answers. Communication: none.
    """
    label = f"rule {name!r} of {', '.join(map(shown, placements))} on mesh {mesh_shape}"
    tensors = list(_tensors_of(args))
    run = _Run(name, function, args, tensors, placements, mesh_shape, dict(kwargs or {}), label)
    with get_platform().enable_grad():
        leaves = [_leaf(x) for x in tensors]
        whole = _results(function(*_with_tensors(args, leaves), **run.kwargs))
        seeded = [_seed(x) for x in whole]
        expected = _gradients(whole, leaves, seeded)
        ranks = run.passes(seeded)
    first = ranks[0].outcome
    for rank in ranks[1:]:
        same = _answer(rank.outcome) == _answer(first)
        assert same, f"{label}: ranks get different answers: {first} and {rank.outcome}"
    for i, value in enumerate(whole):
        place = f"{label}: value" + (f" {i}" if len(whole) > 1 else "")
        spec = ranks[0].specs[i]
        if spec is None:
            found = [rank.results[i] for rank in ranks]
            assert all(x == value for x in found), f"{place}: {found}, expected {value}"
        else:
            _compare(
                assembled({r.coordinate: r.results[i] for r in ranks}, spec.placements, place),
                value,
                place,
                tolerance,
            )
    for i, grad in enumerate(expected):
        if grad is not None:
            place = f"{label}: gradient of tensor {i}"
            _compare(run.gradient(ranks, i, place), grad, place, tolerance)
    return first


@dataclass
class _Rank:
    """What one rank gets."""

    coordinate: Coordinate
    outcome: Outcome
    specs: list[Spec | None]
    """Of the results."""
    wanted: list[Placements]
    """How each input lies when the operation runs."""
    wishes: list[Placements | None]
    """Where the rule asks for that: there the gradients of what is Replicate are summed."""
    pieces: list[Tensor]
    results: list[Any]
    grads: list[Tensor | None] = field(default_factory=list)


@dataclass
class _Run:
    """The operation on all ranks."""

    name: str
    function: Callable[..., Any]
    args: Sequence[Any]
    tensors: Sequence[Tensor]
    placements: Sequence[Sequence[Placement]]
    mesh_shape: tuple[int, ...]
    kwargs: dict[str, Any]
    label: str

    def passes(self, seeded: Sequence[Tensor | None]) -> list[_Rank]:
        """Forward and backward on every rank, as often as collectives need it."""
        replies = Replies()
        while True:
            ranks = [self.forward(c, replies) for c in coordinates(self.mesh_shape)]
            self.backward(ranks, seeded)
            if replies.settle(self.mesh_shape):
                return ranks

    def forward(self, coordinate: Coordinate, replies: Replies) -> _Rank:
        mesh = CheckerMesh(self.mesh_shape, coordinate, replies)
        specs = [
            make_spec(mesh, p, tuple(x.shape)) for x, p in zip(self.tensors, self.placements, strict=True)
        ]
        given, kwargs = self.bound(specs)
        outcome = ask(RULES[self.name], given, kwargs)
        plan = plan_of(outcome, given, self.function)
        wanted = [wish or spec.placements for _, spec, wish in with_wishes(given, outcome.inputs)]
        pieces = [
            _leaf(piece(x, p, self.mesh_shape, coordinate)) for x, p in zip(self.tensors, wanted, strict=True)
        ]
        local = [list(x) if isinstance(x, tuple) else x for x in self.bound(pieces)[0]]
        for position, value in plan.replaced:
            local[position] = value
        results = _results(plan.call(self.function, local, kwargs))
        of_results = _specs_of_results(plan, results)
        assert len(results) == len(of_results), (
            f"{self.label}: {len(results)} results, the rule says {len(of_results)}"
        )
        for result, spec in zip(results, of_results, strict=True):
            assert spec is None or tuple(result.shape) == spec.local_shape, (
                f"{self.label} at {coordinate}: the local result has shape {tuple(result.shape)}, "
                f"its spec {spec.local_shape}"
            )
        wishes = [wish for _, _, wish in with_wishes(given, outcome.inputs)]
        return _Rank(coordinate, outcome, of_results, wanted, wishes, pieces, results)

    def backward(self, ranks: Sequence[_Rank], seeded: Sequence[Tensor | None]) -> None:
        platform = get_platform()
        of_ranks: dict[Coordinate, list[Tensor | None]] = {rank.coordinate: [] for rank in ranks}
        for i, seed in enumerate(seeded):
            spec = ranks[0].specs[i]
            parts: dict[Coordinate, Any] = {}
            if seed is not None:
                assert spec is not None, (
                    f"{self.label}: result {i} has a gradient, but the rule knows no spec of it"
                )
                values = {rank.coordinate: platform.to_numpy(rank.results[i]) for rank in ranks}
                parts = seeds(platform.to_numpy(seed), values, spec.placements)
            for rank in ranks:
                of_rank = None
                if seed is not None:
                    g = parts[rank.coordinate].reshape(rank.results[i].shape)
                    of_rank = platform.tensor(g, seed.dtype, platform.device_of(seed))
                of_ranks[rank.coordinate].append(of_rank)
        for rank in ranks:
            rank.grads = _gradients(rank.results, rank.pieces, of_ranks[rank.coordinate])

    def gradient(self, ranks: Sequence[_Rank], i: int, label: str) -> Any:
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

    def bound(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with other values in the places of the tensors, in the form that the rule takes."""
        rule, args = RULES[self.name], _with_tensors(self.args, tensors)
        return rule.bind(args, self.kwargs) if self.kwargs or rule.binds else (args, {})


def _answer(outcome: Outcome) -> tuple[Any, ...]:
    return outcome.inputs, outcome.output, outcome.shape, outcome.outputs


def _specs_of_results(plan: Plan, results: Sequence[Any]) -> list[Spec | None]:
    if plan.whole_on is not None:
        whole = (REPLICATE,) * len(plan.whole_on.shape)
        return [
            make_spec(plan.whole_on, whole, tuple(x.shape)) if get_platform().is_tensor(x) else None
            for x in results
        ]
    return list(plan.outputs) if plan.outputs is not None else [plan.output]


def _results(found: Any) -> list[Any]:
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _tensors_of(args: Sequence[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, (list, tuple)):
            yield from _tensors_of(arg)
        elif get_platform().is_tensor(arg):
            yield arg


def _with_tensors(args: Sequence[Any], tensors: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with other values in the places of the tensors; lists as tuples."""
    left, is_tensor = iter(tensors), get_platform().is_tensor

    def replaced(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return tuple(map(replaced, x))
        return next(left) if is_tensor(x) else x

    return tuple(map(replaced, args))


def _leaf(x: Tensor) -> Tensor:
    platform = get_platform()
    leaf = platform.clone(platform.detach(x))
    return platform.set_requires_grad_(leaf, True) if platform.is_floating(leaf.dtype) else leaf


def _seed(whole: Any) -> Tensor | None:
    """A gradient of the result in which every element counts differently; None if it has none."""
    platform = get_platform()
    if not platform.is_tensor(whole) or not platform.requires_grad(whole):
        return None
    if not platform.is_floating(whole.dtype):  # an index, which frameworks may say requires a gradient
        return None
    count = math.prod(whole.shape)
    ramp = platform.cast(
        platform.arange(1, count + 1, device=platform.device_of(whole)), platform.dtype_name(whole.dtype)
    )
    return platform.reshape(ramp, tuple(whole.shape)) * 0.25


def _gradients(
    results: Sequence[Any], leaves: Sequence[Tensor], seeded: Sequence[Tensor | None]
) -> list[Tensor | None]:
    platform = get_platform()
    pairs = [
        (x, seed)
        for x, seed in zip(results, seeded, strict=True)
        if seed is not None and platform.requires_grad(x)
    ]
    if all(seed is None for seed in seeded):
        return [None] * len(leaves)
    asked = [i for i, leaf in enumerate(leaves) if platform.requires_grad(leaf)]
    found: Sequence[Tensor | None] = [None] * len(asked)
    if pairs:
        found = platform.grad(
            [x for x, _ in pairs], [leaves[i] for i in asked], [seed for _, seed in pairs], allow_unused=True
        )
    grads: list[Tensor | None] = [None] * len(leaves)
    for i, grad in zip(asked, found, strict=True):
        grads[i] = platform.zeros_like(platform.detach(leaves[i])) if grad is None else grad
    return grads


def _compare(found: Any, expected: Tensor, label: str, tolerance: float) -> None:
    import numpy as np

    wanted = get_platform().to_numpy(expected)
    assert found.shape == wanted.shape, f"{label}: shape {found.shape}, expected {wanted.shape}"
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance, err_msg=label)
