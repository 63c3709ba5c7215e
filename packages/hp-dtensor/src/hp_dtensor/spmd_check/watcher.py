"""What check_spmd does around one operation: look at its arguments, run it, look at its results, wait for their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hp_dtensor.dtensor import DTensorMethods
from hp_dtensor.errors import name_of
from hp_dtensor.nest import leaves
from hp_dtensor.rules.registry import Rule
from hp_dtensor.spec import Spec
from hp_dtensor.spmd_check.agreement import Check, Tolerance, difference, first_lie, replicas
from hp_dtensor.spmd_check.unsharded import Unsharded, piece, reduced
from hp_platform import _process, get_platform

Tensor = Any

_DRAWS = "uniform_ normal_ exponential_ bernoulli_ random_ rand_like randn_like randint_like bernoulli dropout feature_dropout"
RANDOM = frozenset(_DRAWS.split())
"""Rules whose values come from the random stream: drawing once more would give others, and move the stream on."""
UNWRITTEN = frozenset({"empty_like"})
"""Rules whose results hold whatever was in memory."""
_OVERWRITES = frozenset(
    ["copy_", "fill_", "zero_", "uniform_", "normal_", "exponential_", "bernoulli_", "random_"]
)
_READS_NO_VALUES = frozenset(
    ["zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"]
)

_OF_ARGUMENT = (
    "No checked operation made this difference: look at where the tensor comes from: from_local() of values that differ "
    "between ranks (Partial() or Shard() may be what they are; run_check=True compares at once), a module initialised with "
    "another seed on each rank, or values written through to_local()"
)
_OF_RESULT = (
    "All arguments agreed: look at the operation's rule (does its output depend on what only one rank has? then it is a "
    "Partial or a Shard), or at code that does otherwise on each rank"
)
_OF_PIECE = (
    "Look at the placements that the operation's rule answers: inputs that must be whole or reduced first, a Partial claimed "
    "as Replicate, or another order of shards"
)
_NO_PIECE = "is not the piece of the unsharded operation's result that it should be"
_OF_GRADIENT = (
    "Look at the backward of what used this tensor: a custom backward must give every rank the same whole gradient of a "
    "Replicate result's input; where to_local() goes on differently on each rank, say to_local(grad_placements=[Partial()])"
)


class Watcher:
    """One block of check_spmd."""

    def __init__(self, tolerance: Tolerance) -> None:
        self.tolerance = tolerance
        self.modules: list[str] = []
        """Names of the modules that are running, innermost last."""
        self.handles: list[Any] = []
        """Of the hooks to remove at the end."""
        self._leaves: dict[int, Tensor] = {}
        """Local tensors of leaves that have their hook; held, so that no other one gets the same id."""

    def close(self) -> None:
        """Remove all hooks."""
        while self.handles:
            self.handles.pop().remove()
        self._leaves.clear()
        self.modules.clear()

    def run(
        self,
        dispatch: Callable[..., Any],
        rule: Rule,
        function: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
    ) -> Any:
        """The operation, with everything checked that this block promises. RuntimeError for the first lie."""
        token = _process.spmd_watcher.set(None)
        try:
            given = [*_named(args, kwargs)]
            if any(get_platform().device_of(x._local) == "meta" for _, x in given):
                return dispatch(rule, function, args, kwargs)
            where = self._where(function)
            self._check_arguments(rule, given, where)
            compares = rule.name not in RANDOM and rule.name not in UNWRITTEN
            unsharded = Unsharded(rule, function, args, kwargs) if compares else None
            for subject, x in given:
                if x.is_leaf:
                    self._watch_gradient(x, f"{subject} of {where}")
            result = dispatch(rule, function, args, kwargs)
            made = [(i, x) for i, x in enumerate(leaves(result)) if isinstance(x, DTensorMethods)]
            if rule.name not in UNWRITTEN:
                self._check_results(made, unsharded, where)
            for i, x in made:
                # What is given back as it came has its hook.
                if rule.in_place or not any(x._local is y._local for _, y in given):
                    self._watch_gradient(x, f"{_result(i, made)} of {where}")
            return result
        finally:
            _process.spmd_watcher.reset(token)

    def _where(self, function: Any) -> str:
        return name_of(function) + (f" in module {self.modules[-1]}" if self.modules else "")

    # ---------------------------------------------------------------------------------------------------------- forward
    def _check_arguments(self, rule: Rule, given: Sequence[tuple[str, Any]], where: str) -> None:
        if rule.name in _READS_NO_VALUES:
            return
        read = given[1:] if rule.name in _OVERWRITES else given
        checks: list[Check] = []
        seen: list[Any] = []
        for subject, x in read:
            if not any(x is y for y in seen):
                seen.append(x)
                checks.extend(
                    replicas(x._local, x._spec, f"{subject} of {where}", self.tolerance, _OF_ARGUMENT)
                )
        self._judge(checks, [x for _, x in read])

    def _check_results(
        self, made: Sequence[tuple[int, Any]], unsharded: Unsharded | None, where: str
    ) -> None:
        checks: list[Check] = []
        for i, x in made:
            subject = f"{_result(i, made)} of {where}"
            checks.extend(replicas(x._local, x._spec, subject, self.tolerance, _OF_RESULT))
        self._judge(checks, [x for _, x in made])
        if unsharded is None or not made:
            return
        try:
            expected = unsharded.results()
        except (RuntimeError, ValueError, TypeError) as error:
            raise RuntimeError(
                f"check_spmd: {where} ran on the pieces, but on the whole tensors it raised {type(error).__name__}: {error}"
            ) from error
        if expected is None:
            return
        scale, platform = unsharded.scale(), get_platform()
        checks = []
        for i, x in made:
            subject, right = f"{_result(i, made)} of {where}", expected[i]
            if tuple(right.shape) != x._spec.shape:
                raise RuntimeError(
                    f"check_spmd: {subject} has shape {x._spec.shape}, that of the unsharded operation {tuple(right.shape)}. "
                    f"{_OF_PIECE}"
                )
            with platform.no_grad():
                local, spec = reduced(x)
                apart = difference(local, piece(right, spec), self.tolerance, scale)
            checks.append(Check(subject, x._spec, apart, None, _OF_PIECE, _NO_PIECE))
        self._judge(checks, [x for _, x in made])

    def _judge(self, checks: Sequence[Check], about: Sequence[Any]) -> None:
        """RuntimeError, on all ranks, for the first check with which any rank is not content."""
        if not checks:
            return
        lie = first_lie(checks, get_platform().device_of(about[0]._local))
        if lie is not None:
            raise RuntimeError(f"check_spmd: {lie}")

    # --------------------------------------------------------------------------------------------------------- backward
    def _watch_gradient(self, x: Any, subject: str) -> None:
        platform, local = get_platform(), x._local
        if not (platform.requires_grad(local) and platform.is_grad_enabled()):
            return
        if platform.is_leaf(local):
            if id(local) in self._leaves:
                return
            self._leaves[id(local)] = local
        spec = x._spec

        def on_gradient(gradient: Tensor) -> None:
            self._check_gradient(gradient, spec, f"the gradient of {subject}")

        self.handles.append(platform.register_tensor_hook(local, on_gradient))

    def _check_gradient(self, gradient: Tensor, spec: Spec, subject: str) -> None:
        platform = get_platform()
        with platform.no_grad():
            fits = tuple(gradient.shape) == spec.grad.local_shape
            no_piece = f"has shape {tuple(gradient.shape)}, which is not that of its piece"
            checks = [Check(subject, spec.grad, 0.0 if fits else math.inf, None, _OF_GRADIENT, no_piece)]
            compared = replicas(gradient, spec.grad, subject, self.tolerance, _OF_GRADIENT)
            # The factors of a product have each a gradient of their own.
            checks.extend(c for c in compared if not spec.placements[c.mesh_dim or 0].is_partial("prod"))
            lie = first_lie(checks, platform.device_of(gradient))
        if lie is not None:
            raise RuntimeError(f"check_spmd: {lie}")


def _named(args: Iterable[Any], kwargs: Mapping[str, Any] | None) -> Iterator[tuple[str, Any]]:
    """Every DTensor among the arguments, with what messages call it."""
    named = [*((f"argument {i}", arg) for i, arg in enumerate(args))]
    named.extend((f"argument {name!r}", value) for name, value in (kwargs or {}).items() if name != "out")
    for subject, value in named:
        for x in leaves(value):
            if isinstance(x, DTensorMethods):
                yield subject, x


def _result(index: int, made: Sequence[Any]) -> str:
    return f"result {index}" if len(made) > 1 else "the result"
