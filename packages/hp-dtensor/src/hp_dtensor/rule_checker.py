"""Checks a rule in one process: cut the inputs for every rank, run each rank's local operation, put the results together.

Values and gradients must be those of the unsharded operation. Redistribution is not run here: inputs are cut as the rule
wants them, and gradients are put together as :mod:`hp_dtensor.conversions` counts them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hp_dtensor.empty import without_elements
from hp_dtensor.placements import PARTIAL, REPLICATE, Partial, Placement, Shard
from hp_dtensor.rules import RULES
from hp_dtensor.rules.registry import Outcome, Placements
from hp_dtensor.spec import local_block, make_spec, shown
from hp_platform import get_platform

Tensor = Any
Coordinate = tuple[int, ...]


class CheckerMesh:
    """A mesh as one of its ranks sees it, without a process for each."""

    def __init__(self, shape: tuple[int, ...], coordinate: Coordinate) -> None:
        self.shape = shape
        self.interned: dict[Any, Any] = {}
        self._coordinate = coordinate

    def get_coordinate(self) -> Coordinate:
        """The rank's position."""
        return self._coordinate


def check_rule(
    name: str,
    function: Callable[..., Tensor],
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
        function: works on plain tensors of the process' framework.
        args: positional arguments as the rule takes them; tensors are whole, those of a floating dtype are differentiated.
        placements: for each tensor among ``args``, in their order.
        mesh_shape: how many ranks along each mesh dim.
        kwargs: scalars.
        tolerance: largest absolute difference of values and gradients that is allowed.

    Returns what the rule answered on the first rank. AssertionError, with rule, placements and mesh, if a value or gradient
    differs, a local shape is not that of the output's spec, or ranks get different answers. Communication: none.
    """
    platform, kwargs = get_platform(), dict(kwargs or {})
    tensors = [arg for arg in args if platform.is_tensor(arg)]
    label = f"rule {name!r} of {', '.join(map(shown, placements))} on mesh {mesh_shape}"
    with platform.enable_grad():
        leaves = [_leaf(x) for x in tensors]
        whole = function(*_with_tensors(args, leaves), **kwargs)
        seed = _seed(whole)
        expected_grads = _gradients(whole, leaves, seed)
        run = _Run(name, function, args, tensors, placements, mesh_shape, kwargs, seed)
        results = {c: run.on_rank(c) for c in itertools.product(*map(range, mesh_shape))}
    outcomes = [result[0] for result in results.values()]
    first = outcomes[0]
    same = all((o.inputs, o.output, o.shape) == (first.inputs, first.output, first.shape) for o in outcomes)
    assert same, f"{label}: ranks get different answers: {outcomes}"
    value = f"{label}: value"
    found = assembled({c: r[1] for c, r in results.items()}, first.output, mesh_shape, value)
    _compare(found, whole, value, tolerance)
    wanted = [p for p in first.inputs if p is not None]
    for i, expected in enumerate(expected_grads):
        if expected is None:
            continue
        lies = _gradient_lies(wanted[i], first.output)
        gradient = f"{label}: gradient of tensor {i}"
        found = assembled({c: r[2][i] for c, r in results.items()}, lies, mesh_shape, gradient)
        _compare(found, expected, gradient, tolerance)
    return first


class _Run:
    """What every rank does."""

    def __init__(self, *given: Any) -> None:
        (
            self.name,
            self.function,
            self.args,
            self.tensors,
            self.placements,
            self.mesh_shape,
            self.kwargs,
            self.seed,
        ) = given

    def on_rank(self, coordinate: Coordinate) -> tuple[Outcome, Tensor, list[Tensor | None]]:
        mesh = CheckerMesh(self.mesh_shape, coordinate)
        specs = [
            make_spec(mesh, p, tuple(x.shape)) for x, p in zip(self.tensors, self.placements, strict=True)
        ]
        given = _with_tensors(self.args, specs)
        outcome = RULES[self.name].plan(*given, **self.kwargs)
        wanted = [p for p in outcome.inputs if p is not None]
        pieces = [
            _leaf(piece(x, p, self.mesh_shape, coordinate)) for x, p in zip(self.tensors, wanted, strict=True)
        ]
        local = list(_with_tensors(self.args, pieces))
        for position, value in outcome.replaced.items():
            local[position] = value
        shape, _ = local_block(outcome.shape, outcome.output, self.mesh_shape, coordinate)
        run = outcome.run or self.function
        result = (without_elements(run) if 0 in shape else run)(*local, **self.kwargs)
        assert tuple(result.shape) == shape, (
            f"rule {self.name!r} of {specs} at {coordinate}: the local result has shape {tuple(result.shape)}, its spec {shape}"
        )
        seed = None
        if self.seed is not None:
            lies = make_spec(mesh, outcome.output, outcome.shape).grad.placements
            # The gradient of an average is 1/w of the whole on each rank, not any sum that makes the whole.
            ranks = _averaged_ranks(outcome.output, self.mesh_shape)
            seed = piece(
                self.seed / ranks, _with_whole_sums(lies, outcome.output), self.mesh_shape, coordinate
            )
        return outcome, result, _gradients(result, pieces, seed)


def piece(x: Tensor, placements: Placements, mesh_shape: Sequence[int], coordinate: Coordinate) -> Tensor:
    """The part of a whole tensor at a coordinate. A sum or average is taken apart into unequal summands."""
    platform = get_platform()
    sizes, offsets = local_block(x.shape, placements, mesh_shape, coordinate)
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        x = platform.narrow(x, dim, offset, size)
    for placement, num_ranks, index in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, Partial):
            # 0.5, 1, 1.5, ... and what is missing to 1: exact in binary.
            weight = 0.5 * (index + 1) if index else 1 - 0.25 * (num_ranks - 1) * (num_ranks + 2)
            x = x * (weight * (num_ranks if placement != PARTIAL else 1))
    return platform.clone(platform.detach(x))


def assembled(
    pieces: Mapping[Coordinate, Tensor],
    placements: Placements,
    mesh_shape: Sequence[int],
    label: str = "pieces",
) -> Any:
    """The whole, as a numpy array, of the ranks' pieces. AssertionError, with ``label``, if replicas differ."""
    import numpy as np

    arrays = {coordinate: get_platform().to_numpy(x) for coordinate, x in pieces.items()}
    for mesh_dim in reversed(range(len(mesh_shape))):
        placement, num_ranks = placements[mesh_dim], mesh_shape[mesh_dim]
        joined = {}
        for outer in itertools.product(*map(range, mesh_shape[:mesh_dim])):
            line = [(*outer, index) for index in range(num_ranks)]
            parts = [arrays[coordinate] for coordinate in line]
            if isinstance(placement, Shard):
                joined[outer] = np.concatenate(parts, placement.dim)
            elif isinstance(placement, Partial):
                joined[outer] = np.sum(parts, axis=0) / (1 if placement == PARTIAL else num_ranks)
            else:
                for other in parts[1:]:
                    np.testing.assert_allclose(
                        other, parts[0], rtol=0, atol=1e-11, err_msg=f"{label}: replicas differ"
                    )
                joined[outer] = parts[0]
        arrays = joined
    return arrays[()]


def _gradient_lies(wanted: Placements, output: Placements) -> Placements:
    """How the local gradient of an input lies: see [Note: how gradients are counted] in hp_dtensor.conversions."""
    lies: list[Placement] = []
    for own, out in zip(wanted, output, strict=True):
        is_summand = own.is_partial("avg") or (own.is_replicate() and not out.is_replicate())
        lies.append(PARTIAL if is_summand else own if own.is_shard() else REPLICATE)
    return tuple(lies)


def _averaged_ranks(output: Placements, mesh_shape: Sequence[int]) -> int:
    return math.prod(n for p, n in zip(output, mesh_shape, strict=True) if p.is_partial("avg"))


def _with_whole_sums(lies: Placements, output: Placements) -> Placements:
    return tuple(REPLICATE if out.is_partial() else own for own, out in zip(lies, output, strict=True))


def _leaf(x: Tensor) -> Tensor:
    platform = get_platform()
    leaf = platform.clone(platform.detach(x))
    return platform.set_requires_grad_(leaf, True) if platform.is_floating(leaf.dtype) else leaf


def _seed(whole: Tensor) -> Tensor | None:
    """A gradient of the result in which every element counts differently; None if it has none."""
    platform = get_platform()
    if not platform.requires_grad(whole):
        return None
    count = math.prod(whole.shape)
    ramp = platform.cast(
        platform.arange(1, count + 1, device=platform.device_of(whole)), platform.dtype_name(whole.dtype)
    )
    return platform.reshape(ramp, tuple(whole.shape)) * 0.25


def _gradients(result: Tensor, leaves: Sequence[Tensor], seed: Tensor | None) -> list[Tensor | None]:
    platform = get_platform()
    if seed is None:
        return [None] * len(leaves)
    asked = [i for i, leaf in enumerate(leaves) if platform.requires_grad(leaf)]
    found = platform.grad([result], [leaves[i] for i in asked], [seed], allow_unused=True)
    grads: list[Tensor | None] = [None] * len(leaves)
    for i, grad in zip(asked, found, strict=True):
        grads[i] = platform.zeros_like(platform.detach(leaves[i])) if grad is None else grad
    return grads


def _compare(found: Any, expected: Tensor, label: str, tolerance: float) -> None:
    import numpy as np

    wanted = get_platform().to_numpy(expected)
    assert found.shape == wanted.shape, f"{label}: shape {found.shape}, expected {wanted.shape}"
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance, err_msg=label)


def _with_tensors(args: Sequence[Any], tensors: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments with other values in the places of the tensors."""
    left, platform = iter(tensors), get_platform()
    return tuple(next(left) if platform.is_tensor(arg) else arg for arg in args)
