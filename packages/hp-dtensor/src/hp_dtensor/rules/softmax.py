"""Softmax and its kin: along a dim that every rank has whole. The logarithm of a sum of exponentials can be put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hp_dtensor import across
from hp_dtensor.placements import REPLICATE
from hp_dtensor.rules.along import dim_of, lying, shape_without
from hp_dtensor.rules.reduction import lacks_elements, local_sum, neutral, reduced, widened
from hp_dtensor.rules.registry import Outcome, rule
from hp_platform import get_platform


@rule("softmax", params=("input", ("dim", None)))
def softmax(x: Any, dim: Any = None, *rest: Any, **kwargs: Any) -> Outcome:
    """softmax, log_softmax, softmin along ``dim``; without one, torch's old rule: 0 of tensors with 0, 1 or 3 dims, else 1."""
    ndim = len(x.shape)
    dims = dim_of((0 if ndim in (0, 1, 3) else 1) if dim is None else dim, ndim)
    lies = lying(x, dims)
    return Outcome((lies,), lies, x.shape)


@rule("logsumexp", params=("input", "dim", ("keepdim", False)))
def logsumexp(x: Any, dim: Any, keepdim: bool = False) -> Outcome:
    """``log(sum(exp(x)))``. Over a cut dim of the ranks' own results: two all-reduces of the result's size."""
    outcome, dims, is_cut = reduced(x, dim, keepdim, (), REPLICATE)
    if not is_cut:
        return outcome
    mesh_dims, nothing = across.cutting(x, dims), lacks_elements(x, outcome, dims)

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(local: Any, *args: Any, **named: Any) -> Any:
            platform = get_platform()
            with platform.no_grad():
                own = (
                    neutral(function, local, args, named, dims, keepdim, float("-inf"))
                    if nothing
                    else function(local, *args, **named)
                )
            largest = across.reduced(widened(own), x, mesh_dims, "max")
            # Infinities are no distance to measure from.
            base = platform.where(abs(largest) == float("inf"), platform.zeros_like(largest), largest)
            # Not of the ranks' results: where all that a rank has is -inf, the gradient of its result is no number.
            rows = platform.reshape(base, shape_without(local.shape, dims, True))
            powers = local_sum(platform.exp(widened(local) - rows), dims, keepdim)
            return platform.cast(platform.log(across.total(powers, x, mesh_dims)) + base, own.dtype)

        return run

    return replace(outcome, around=around)
