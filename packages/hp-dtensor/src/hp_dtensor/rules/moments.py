"""Variances and standard deviations.

Over a cut dim in two passes, as on one device: the mean of the whole first (one all-reduce of the result's size), then the
squares of the distances from it, which is exact where a difference of sums of squares would cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hp_dtensor import across
from hp_dtensor.no_elements import zeros_from
from hp_dtensor.placements import PARTIAL, REPLICATE, Placement, Shard
from hp_dtensor.rules.along import dims_of, dropped, lying, shape_without
from hp_dtensor.rules.norm import root
from hp_dtensor.rules.reduction import as_floating, local_sum, widened
from hp_dtensor.rules.registry import Outcome, Result, rule
from hp_dtensor.spec import Spec
from hp_platform import get_platform

Tensor = Any


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(input, dim, correction, keepdim)`` of all spellings: ``(unbiased)``, ``(dim, unbiased, keepdim)``, and by name."""
    rest = dict(kwargs)
    given = list(args)
    x = given.pop(0) if given else rest.pop("input")
    unbiased = rest.pop("unbiased", None)
    if given and isinstance(given[0], bool):
        unbiased = given.pop(0)
    dim = given.pop(0) if given else rest.pop("dim", rest.pop("axis", None))
    if given:
        unbiased = given.pop(0)
    keepdim = given.pop(0) if given else rest.pop("keepdim", rest.pop("keepdims", False))
    correction = rest.pop("correction", None)
    if given or rest or (unbiased is not None and correction is not None):
        raise ValueError(
            "takes (input, dim, *, correction=1, keepdim=False), or unbiased in the place of correction; got "
            f"{[*given, *rest] or 'both of them'}"
        )
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    return (x, tuple(dim) if isinstance(dim, list) else dim, correction, keepdim), {}


def _moment(name: str, *, is_root: bool, with_mean: bool) -> None:
    @rule(name, params=("input",), normalise=_arguments)
    def plan(x: Any, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Outcome:
        dims = dims_of(dim, len(x.shape))
        mesh_dims = across.cutting(x, dims)
        inputs = lying(x)
        # A root needs the whole sum: it is known to all ranks. A variance is a sum, divided.
        left: Placement = REPLICATE if is_root else PARTIAL
        output = tuple(
            left if isinstance(p, Shard) and p.dim in dims else dropped((p,), dims, keepdim)[0]
            for p in inputs
        )
        result = Result(output, shape_without(x.shape, dims, keepdim))

        def around(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(local: Any, *_: Any) -> Any:
                if mesh_dims:
                    return _across_ranks(local, x, dims, mesh_dims, correction, keepdim, is_root, with_mean)
                if 0 in local.shape and 0 not in x.shape:
                    # Neither has the result elements, and kernels warn of a division by 0.
                    nothing = local_sum(local, dims, keepdim)
                    return (nothing, nothing) if with_mean else nothing
                return function(local, dim=dims or None, correction=correction, keepdim=keepdim)

            return run

        outputs = (result, result) if with_mean else None
        return Outcome((inputs,), None if with_mean else output, result.shape, around=around, outputs=outputs)

    plan.__doc__ = f"``{name}(x, dim, correction=1, keepdim=False)``."


_moment("var", is_root=False, with_mean=False)
_moment("std", is_root=True, with_mean=False)
_moment("var_mean", is_root=False, with_mean=True)
_moment("std_mean", is_root=True, with_mean=True)


def _across_ranks(
    local: Tensor,
    x: Spec,
    dims: tuple[int, ...],
    mesh_dims: tuple[int, ...],
    correction: Any,
    keepdim: bool,
    is_root: bool,
    with_mean: bool,
) -> Any:
    platform = get_platform()
    narrow, local = local.dtype, widened(as_floating(local, None, "a variance"))
    count = math.prod(x.shape[d] for d in dims)
    own = local_sum(local, dims, True) / count
    mean = across.total(own, x, mesh_dims)
    centre = across.used_differently(mean, x, mesh_dims)
    if 0 in local.shape:  # see [Note: empty pieces] in hp_dtensor.no_elements
        squares = zeros_from(local_sum(local, dims, keepdim), [local, centre])
    else:
        distance = local - centre
        squares = local_sum(distance * distance, dims, keepdim)
    if is_root:
        squares = across.total(squares, x, mesh_dims)
    left = max(0, count - correction)
    divisor = platform.full((), left, local.dtype, platform.device_of(local))
    result = squares / divisor
    result = platform.cast(root(result) if is_root else result, narrow)
    if not with_mean:
        return result
    shape = shape_without(local.shape, dims, keepdim)
    return result, platform.cast(platform.reshape(mean if is_root else own, shape), narrow)
