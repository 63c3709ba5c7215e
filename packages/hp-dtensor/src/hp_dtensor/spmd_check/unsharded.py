"""The unsharded operation: the framework's function on whole tensors, and this rank's piece of what it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hp_dtensor.dtensor import DTensorMethods
from hp_dtensor.nest import leaves, map_leaves
from hp_dtensor.placements import REPLICATE
from hp_dtensor.redistribution import moves_between, run_moves
from hp_dtensor.rules.registry import Rule
from hp_dtensor.spec import Spec, make_spec
from hp_dtensor.spmd_check.agreement import largest
from hp_platform import get_platform
from hp_platform.recording import record_collectives

Tensor = Any


class Unsharded:
    """One call of an operation, kept as it is before it runs: its arguments whole, in memory of their own.

    Communication: what ``full_tensor()`` of every DTensor argument needs. Nothing is recorded for backward.
    """

    def __init__(
        self, rule: Rule, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> None:
        # In place on whole tensors only where there is no other way: MindSpore on CPU ignores it silently.
        self._run = (rule.functional or function) if rule.in_place else function
        with get_platform().no_grad():
            self._args = [map_leaves(_whole, arg) for arg in args]
            self._kwargs = {name: map_leaves(_whole, value) for name, value in (kwargs or {}).items()}

    def results(self) -> list[Any] | None:
        """The leaves of what it gives, or None if it communicated, so that it is no operation on whole tensors."""
        platform = get_platform()
        with platform.no_grad(), record_collectives() as record:
            found = self._run(*self._args, **self._kwargs)
        if record.launches:
            return None
        return list(leaves(self._args[0] if found is None else found))

    def scale(self) -> float:
        """The largest magnitude among the arguments: roundings are counted from there."""
        is_tensor = get_platform().is_tensor
        given = [*leaves(self._args), *leaves(self._kwargs)]
        return max((largest(x) for x in given if is_tensor(x)), default=0.0)


def piece(whole: Tensor, spec: Spec) -> Tensor:
    """This rank's piece of a whole tensor, for a spec without Partial. No communication."""
    source = make_spec(spec.mesh, (REPLICATE,) * len(spec.placements), spec.shape)
    return run_moves(whole, source, moves_between(source, spec))


def reduced(x: Any) -> tuple[Tensor, Spec]:
    """The local tensor of a DTensor, its sums (and other reductions) carried out."""
    spec: Spec = x._spec
    lies = [REPLICATE if p.is_partial() else p for p in spec.placements]
    target = make_spec(spec.mesh, lies, spec.shape)
    return run_moves(get_platform().detach(x._local), spec, moves_between(spec, target)), target


def _whole(x: Any) -> Any:
    platform = get_platform()
    if not isinstance(x, DTensorMethods):
        return platform.clone(platform.detach(x)) if platform.is_tensor(x) else x
    spec = x._spec
    moves = moves_between(spec, make_spec(spec.mesh, (REPLICATE,) * len(spec.placements), spec.shape))
    return platform.clone(run_moves(platform.detach(x._local), spec, moves))
