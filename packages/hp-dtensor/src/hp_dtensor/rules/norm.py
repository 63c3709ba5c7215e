"""Norms of vectors and matrices. Over cut dims powers are summed, or extremes taken, of what the ranks have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hp_dtensor import across
from hp_dtensor.placements import PARTIAL, REPLICATE, Partial, Placement, Shard
from hp_dtensor.rules.along import checked_keepdim, dims_of, dropped, lying, shape_without
from hp_dtensor.rules.extremes import shared_among_ties
from hp_dtensor.rules.reduction import as_floating, local_sum, neutral, widened
from hp_dtensor.rules.registry import Outcome, rule
from hp_dtensor.spec import Spec
from hp_platform import get_platform

Tensor = Any
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@rule("vector_norm", params=("input", ("ord", 2), ("dim", None), ("keepdim", False), ("dtype", None)))
def vector_norm(x: Any, order: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Outcome:
    """``(sum |x|^ord)^(1/ord)``; the largest for inf, the smallest for -inf, how many are not 0 for 0.

    Over a cut dim: for ord 1 and 0 a sum, for the infinities an extreme, both without communication; for others the powers
    are added up by one all-reduce of the result's size.
    """
    if isinstance(order, (str, bool)) or not isinstance(order, (int, float)):
        raise ValueError(f"the order of a vector norm is a number, got {order!r}")
    return _of_vectors(
        x, float(order), dims_of(dim, len(x.shape)), checked_keepdim(keepdim), dtype, _vector_call
    )


def _vector_call(function: Callable[..., Any], local: Tensor, args: tuple[Any, ...]) -> Tensor:
    defaults: tuple[Any, ...] = (2, None, False, None)
    *given, dtype = args + defaults[len(args) :]
    return function(local, *given) if dtype is None else function(local, *given, dtype=dtype)


def _of_vectors(
    x: Spec,
    order: float,
    dims: tuple[int, ...],
    keepdim: bool,
    dtype: Any,
    call: Callable[[Callable[..., Any], Tensor, tuple[Any, ...]], Tensor],
) -> Outcome:
    mesh_dims = across.cutting(x, dims)
    inputs = lying(x)
    kinds: dict[float, Placement] = {
        0.0: PARTIAL,
        1.0: PARTIAL,
        math.inf: Partial("max"),
        -math.inf: Partial("min"),
    }
    left = kinds.get(order, REPLICATE)
    output = tuple(
        left if isinstance(p, Shard) and p.dim in dims else dropped((p,), dims, keepdim)[0] for p in inputs
    )

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(local: Any, *args: Any, **named: Any) -> Any:
            if not mesh_dims:
                return call(function, local, args)
            local = as_floating(local, dtype, "a norm")
            if left == REPLICATE:
                powers = local_sum(_power(widened(local), order), dims, keepdim)
                return get_platform().cast(root(across.total(powers, x, mesh_dims), order), local.dtype)
            if any(local.shape[d] == 0 for d in dims):
                value = -math.inf if order == math.inf else math.inf if order == -math.inf else 0
                own = neutral(lambda y: y, local, (), {}, dims, keepdim, value)
            else:
                own = call(function, local, args)
            if left == PARTIAL:
                return own
            return shared_among_ties(own, abs(local), x, dims, "max" if order > 0 else "min", 0.0)

        return run

    return Outcome((inputs,), output, shape_without(x.shape, dims, keepdim), around=around)


def _power(x: Tensor, order: float) -> Tensor:
    if order == 2:
        return x * x
    platform: Any = get_platform()
    exponent = platform.full((), order, x.dtype, platform.device_of(x))
    if order > 1:
        return abs(x) ** exponent
    # At 0 the slope is infinite; the framework has 0 for its gradient.
    is_zero = platform.detach(x) == 0
    ones = platform.zeros_like(x) + 1
    powers = abs(platform.where(is_zero, ones, x)) ** exponent
    return platform.where(is_zero, ones * (0.0 if order > 0 else math.inf), powers)


def root(total: Tensor, order: float = 2) -> Tensor:
    """The order-th root, whose gradient at 0 is 0, as the framework has it for norms and standard deviations."""
    platform: Any = get_platform()
    is_zero = platform.detach(total) == 0
    safe = platform.where(is_zero, platform.zeros_like(total) + 1, total)
    if order == 2:
        root = platform.sqrt(safe)
    else:
        root = safe ** platform.full((), 1 / order, total.dtype, platform.device_of(total))
    return platform.where(is_zero, total if order > 0 else total + math.inf, root)


def _norm_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """``(input, p, dim, keepdim, dtype)``; linalg calls p ord, and means by None the norm of the flattened tensor."""
    rest = dict(kwargs)
    names = {"p": "p", "ord": "p", "dim": "dim", "axis": "dim", "keepdim": "keepdim", "keepdims": "keepdim"}
    given = dict(zip(("input", "p", "dim", "keepdim", "dtype"), args, strict=False))
    for name in list(rest):
        value = rest.pop(name)
        if name != "out" or value is not None:
            given[names.get(name, name)] = value
    unknown = set(given) - {"input", "p", "dim", "keepdim", "dtype"}
    if unknown:
        raise ValueError(
            f"a norm takes input, p (or ord), dim, keepdim and dtype, not {', '.join(sorted(unknown))}"
        )
    dim = given.get("dim")
    dim = tuple(dim) if isinstance(dim, list) else dim
    values = (given["input"], given.get("p", "default"), dim, given.get("keepdim", False), given.get("dtype"))
    return values, {}


@rule("norm", params=("input",), normalise=_norm_arguments)
def norm(x: Any, p: Any = "default", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Outcome:
    """``x.norm(p, dim)``, where a number is the order of a vector norm whatever the dims are."""
    dims = dims_of(dim, len(x.shape))

    def call(function: Callable[..., Any], local: Tensor, args: tuple[Any, ...]) -> Tensor:
        named = {} if p == "default" else {"p": p}
        return function(local, **named, dim=dim, keepdim=keepdim, dtype=dtype)

    if p == "nuc":
        return _of_matrices(x, dim if dim is not None else (-2, -1), keepdim, lambda f, y: call(f, y, ()))
    if (
        p is not None
        and p not in ("default", "fro")
        and (isinstance(p, (str, bool)) or not isinstance(p, (int, float)))
    ):
        raise ValueError(f"p of a norm is a number, 'fro' or 'nuc', got {p!r}")
    order = 2.0 if p in ("default", "fro", None) else float(p)
    return _of_vectors(x, order, dims, checked_keepdim(keepdim), dtype, call)


@rule("linalg_norm", params=("input",), normalise=_norm_arguments)
def linalg_norm(
    x: Any, p: Any = "default", dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Outcome:
    """``linalg.norm(x, ord, dim)``: of matrices where ord is given with two dims, else of vectors."""
    given = None if p == "default" else p

    def call(function: Callable[..., Any], local: Tensor, args: tuple[Any, ...] = ()) -> Tensor:
        return function(local, given, dim, keepdim, dtype=dtype)

    num_dims = len(x.shape) if dim is None else 1 if isinstance(dim, int) else len(dim)
    if given is None or (num_dims == 1 and not isinstance(given, str)):
        order = 2.0 if given is None else float(given)
        return _of_vectors(x, order, dims_of(dim, len(x.shape)), checked_keepdim(keepdim), dtype, call)
    return _matrix_norm(x, given, (-2, -1) if dim is None else dim, keepdim, dtype, call)


def _matrix_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    (x, p, dim, keepdim, dtype), rest = _norm_arguments(args, kwargs)
    return (x, "fro" if p == "default" else p, (-2, -1) if dim is None else dim, keepdim, dtype), rest


@rule("matrix_norm", params=("input",), normalise=_matrix_arguments)
def matrix_norm(
    x: Any, p: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, dtype: Any = None
) -> Outcome:
    """``linalg.matrix_norm``: the Frobenius norm is a vector norm; for the others every rank needs the matrices whole."""

    def call(function: Callable[..., Any], local: Tensor, args: tuple[Any, ...] = ()) -> Tensor:
        return function(local, p, dim, keepdim, dtype=dtype)

    return _matrix_norm(x, p, dim, keepdim, dtype, call)


def _matrix_norm(
    x: Spec, p: Any, dim: Any, keepdim: bool, dtype: Any, call: Callable[..., Tensor]
) -> Outcome:
    dims = dims_of(dim, len(x.shape))
    if len(dims) != 2:
        raise ValueError(
            f"a matrix norm needs two dims, got dim {dim!r} of a tensor with {len(x.shape)} dims"
        )
    if p == "fro":
        return _of_vectors(x, 2.0, dims, checked_keepdim(keepdim), dtype, call)
    return _of_matrices(x, dim, keepdim, call)


def _of_matrices(x: Spec, dim: Any, keepdim: bool, call: Callable[..., Tensor]) -> Outcome:
    dims = dims_of(dim, len(x.shape))
    inputs = lying(x, dims)

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda local, *_: call(function, local)

    shape = shape_without(x.shape, dims, checked_keepdim(keepdim))
    return Outcome((inputs,), dropped(inputs, dims, keepdim), shape, around=around)
