"""More along a dim that every rank needs whole, or of whole matrices: differences, areas, quantiles, gates, covariances."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.no_elements import zeros_from
from hp_dtensor.placements import PARTIAL, REPLICATE, Partial, Shard
from hp_dtensor.rules.along import SUMS, checked_keepdim, dim_of, dims_of, lying, shape_without
from hp_dtensor.rules.labels import Labelled, Labels, Operand, Role, labelled, local_shape, numbered
from hp_dtensor.rules.registry import EVERY_KIND, Outcome, Placements, rule
from hp_dtensor.spec import Spec, local_block
from hp_platform import get_platform

Tensor = Any


def _resized(shape: Sequence[int], at: int, size: int) -> tuple[int, ...]:
    return (*shape[:at], size, *shape[at + 1 :])


def _at(x: Any, dim: Any, name: str) -> int:
    if not isinstance(x, Spec) or not x.shape:
        raise ValueError(f"{name} takes a tensor with at least one dim, got {x}")
    return dim_of(dim, len(x.shape))[0]


@rule("prelu", params=("input", "weight"))
def prelu(x: Any, weight: Any) -> Outcome:
    """``max(x, 0) + weight * min(x, 0)``: one weight, or one for each channel (dim 1), which is cut as the channels are."""
    if not isinstance(x, Spec) or not isinstance(weight, Spec) or len(weight.shape) > 1:
        raise ValueError(f"prelu takes a tensor, and a weight with at most one dim, got {weight}")
    channels = x.shape[1] if len(x.shape) > 1 else 1
    count = math.prod(weight.shape)
    if count not in (1, channels):
        raise ValueError(f"prelu of shape {x.shape} takes 1 weight or {channels}, got {count}")
    lies = tuple(REPLICATE if isinstance(p, Partial) else p for p in x.placements)
    of_weight = tuple(Shard(0) if p == Shard(1) and count > 1 else REPLICATE for p in lies)
    return Outcome((lies, of_weight), lies, x.shape)


@rule("glu", params=("input", ("dim", -1)))
def glu(x: Any, dim: int = -1) -> Outcome:
    """The first half of ``dim`` times the sigmoid of the second."""
    at = _at(x, dim, "glu")
    if x.shape[at] % 2:
        raise ValueError(f"glu halves a dim, but dim {dim} of shape {x.shape} has an odd size")
    lies = lying(x, (at,))
    return Outcome((lies,), lies, _resized(x.shape, at, x.shape[at] // 2))


@rule("diff", params=("input", ("n", 1), ("dim", -1), ("prepend", None), ("append", None)))
def diff(x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Outcome:
    """Differences of neighbours along ``dim``, ``n`` times. Linear."""
    at = _at(x, dim, "diff")
    more = [t for t in (prepend, append) if t is not None]
    if not all(isinstance(t, Spec) for t in more):
        raise ValueError("prepend and append of diff are tensors")
    if not n:  # what stands before and behind is not looked at then
        as_it_is: Callable[..., Any] = lambda function: lambda local, *_: function(local, 0, dim)  # noqa: E731
        return Outcome((x.placements,), x.placements, x.shape, around=as_it_is)
    size = max(0, x.shape[at] + sum(t.shape[at] for t in more) - n)
    if not more:
        lies = lying(x, (at,), SUMS)
        return Outcome((lies,), lies, _resized(x.shape, at, size))
    labels = tuple("" if i == at else f"dim {i}" for i in range(len(x.shape)))
    places = [(0, x), *((i, t) for i, t in ((3, prepend), (4, append)) if t is not None)]
    operands = [Operand(place, t, labels, Role.SUMMAND if place else Role.FACTOR) for place, t in places]
    return labelled(operands, [Labelled(labels, _resized(x.shape, at, size))])


def _areas(name: str, shrinks: bool) -> None:
    @rule(name, params=("y", ("x", None)))
    def plan(y: Any, x: Any = None, *, dx: Any = 1, dim: int = -1) -> Outcome:
        at = _at(y, dim, name)
        names = tuple("" if i == at else f"dim {i}" for i in range(len(y.shape)))
        operands = [Operand(0, y, names)]
        if isinstance(x, Spec):
            if x.shape != y.shape and len(x.shape) != 1:
                raise ValueError(f"the places of {name} have shape {y.shape} or one dim, got {x.shape}")
            operands.append(Operand(1, x, names if len(x.shape) == len(y.shape) else ("",)))
        if not shrinks:
            rest = (*names[:at], *names[at + 1 :])
            return labelled(operands, [Labelled(rest, shape_without(y.shape, (at,), False))])
        return labelled(operands, [Labelled(names, _resized(y.shape, at, max(0, y.shape[at] - 1)))])

    plan.__doc__ = (
        f"{name}: areas under ``y`` along a dim, by trapezoids. Linear in ``y``, and in the places ``x``."
    )


_areas("trapezoid", False)
_areas("cumulative_trapezoid", True)


@rule("quantile", params=("input", "q", ("dim", None), ("keepdim", False)))
def quantile(
    x: Any, q: Any, dim: Any = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Outcome:
    """quantile, nanquantile: of all, or along ``dim``; of several ``q`` (a vector) in a new first dim."""
    dims = dims_of(dim, len(x.shape))
    if isinstance(q, Spec) and len(q.shape) > 1:
        raise ValueError(f"q is a number or a vector of numbers, got shape {q.shape}")
    names = tuple("" if i in dims else f"dim {i}" for i in range(len(x.shape)))
    operands = [Operand(0, x, names, Role.PLAIN)]
    of_q: Labels = ()
    if isinstance(q, Spec):
        of_q = ("q",) * len(q.shape)
        operands.append(Operand(1, q, of_q, Role.PLAIN))
    count = q.shape if isinstance(q, Spec) else ()
    shape = (*count, *shape_without(x.shape, dims, checked_keepdim(keepdim)))
    left = tuple(name for i, name in enumerate(names) if keepdim or i not in dims)
    found = labelled(operands, [Labelled((*of_q, *left), shape)])
    assert found.output is not None
    own = local_shape(x, found.output, shape)
    if (
        all(0 not in local_shape(t, lies) for t, lies in zip((x, q), found.inputs, strict=False))
        or 0 in x.shape
    ):
        return found

    def run(local: Tensor, *rest: Any, **_: Any) -> Tensor:
        # See [Note: empty pieces] in hp_dtensor.no_elements: the kernel refuses them.
        platform = get_platform()
        tensors = [local, *(t for t in rest[:1] if platform.is_tensor(t))]
        return zeros_from(platform.zeros(own, local.dtype, platform.device_of(local)), tensors)

    return replace(found, run=run)


@rule("trace", params=("input",))
def trace(x: Any) -> Outcome:
    """The sum of the diagonal. Of a cut matrix every rank adds up what it has of it: a Partial."""
    if len(x.shape) != 2:
        raise ValueError(f"trace takes a matrix, got shape {x.shape}")
    lies = lying(x, (), SUMS)
    row, column, count = diagonal_block(x, lies)
    output = tuple(PARTIAL if isinstance(p, Shard) else p for p in lies)
    found = Outcome((lies,), output, ())
    if local_shape(x, lies) == x.shape:
        return found

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(local: Tensor) -> Tensor:
            platform = get_platform()
            if count == 0:
                return zeros_from(platform.zeros((), local.dtype, platform.device_of(local)), [local])
            return function(platform.narrow(platform.narrow(local, 0, row, count), 1, column, count))

        return run

    return replace(found, around=around)


def diagonal_block(x: Spec, lies: Placements) -> tuple[int, int, int]:
    """Row and column of its piece where this rank's part of the main diagonal begins, and how long it is."""
    (rows, columns), (top, left) = local_block(x.shape, lies, x.mesh.shape, x.mesh.get_coordinate())
    first = max(top, left)
    count = max(0, min(top + rows, left + columns) - first)
    return first - top, first - left, count


@rule("renorm", params=("input", "p", "dim", "maxnorm"))
def renorm(x: Any, p: Any, dim: int, maxnorm: Any) -> Outcome:
    """Slices along ``dim`` whose norm exceeds ``maxnorm`` are scaled down to it. They lie whole; ``dim`` itself may be cut."""
    at = _at(x, dim, "renorm")
    lies = lying(x, [d for d in range(len(x.shape)) if d != at])
    return Outcome((lies,), lies, x.shape)


def _of_variables(name: str) -> None:
    @rule(name, params=("input",))
    def plan(x: Any, *, fweights: Any = None, aweights: Any = None, **options: Any) -> Outcome:
        if len(x.shape) > 2:
            raise ValueError(
                f"{name} takes a matrix (variables, observations) or a vector, got shape {x.shape}"
            )
        whole = (REPLICATE,) * len(x.placements)
        # Of one variable, also in a matrix, it is a number.
        num_variables = x.shape[0] if len(x.shape) == 2 else 1
        return Outcome((whole,), whole, () if num_variables == 1 else (num_variables, num_variables))

    plan.__doc__ = f"{name} of ``(variables, observations)``: every rank has all of it, and of the result."


_of_variables("cov")
_of_variables("corrcoef")


@rule("put", params=("input", "index", "source", ("accumulate", False)))
def put(x: Any, index: Any, source: Any, accumulate: bool = False) -> Outcome:
    """Values written at places of the flattened whole. The target is joined: the places run over the whole.

    What is only added may come in parts: where the places are cut, every rank adds its own, and the results are summands.
    """
    if not (isinstance(index, Spec) and isinstance(source, Spec)):
        raise ValueError("put takes tensors for index and source")
    of_x, of_values = (Role.SUMMAND, Role.FACTOR) if accumulate else (Role.PLAIN, Role.PLAIN)
    names = numbered("place", len(index.shape)) if accumulate and index.shape == source.shape else None
    operands = [
        Operand(0, x, ("",) * len(x.shape), of_x),
        Operand(1, index, names or ("",) * len(index.shape), Role.PLAIN),
        Operand(2, source, names or ("",) * len(source.shape), of_values),
    ]
    return labelled(operands, [Labelled(("",) * len(x.shape), x.shape)])


def _of_list(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tensors given one by one as one list; the function itself is called as it was."""
    is_list = len(args) == 1 and isinstance(args[0], (list, tuple))
    return (tuple(args[0]) if is_list else tuple(args), is_list), kwargs


@rule("block_diag", normalise=_of_list, carries=EVERY_KIND)
def block_diag(xs: Any, is_list: bool) -> Outcome:
    """Matrices along the diagonal of a large one. They are joined, and every rank has the result. Linear in all at once."""
    specs = [x for x in xs if isinstance(x, Spec)]
    if len(specs) != len(xs) or any(len(x.shape) > 2 for x in specs):
        raise ValueError("block_diag takes tensors with at most two dims")
    operands = [
        Operand((0, i), x, ("",) * len(x.shape), Role.SUMMAND if i else Role.FACTOR)
        for i, x in enumerate(specs)
    ]
    sizes = [(1, 1, *x.shape)[-2:] for x in specs]
    shape = (sum(n for n, _ in sizes), sum(n for _, n in sizes))

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tensors, _: function(tensors) if is_list else function(*tensors)

    return replace(labelled(operands, [Labelled(("", ""), shape)]), around=around)
