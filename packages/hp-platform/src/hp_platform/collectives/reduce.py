"""Reductions over ranks: all_reduce, reduce_scatter, and the rules of the reduce operations.

"mean" is right on every backend: gloo has none and HCCL's is a division behind a sum, so where the backend does not say
that it has it, the sum is divided here, once, for all frameworks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, overload

from hp_platform.collectives._launch import (
    Work,
    alone,
    device_type,
    finished,
    is_bool,
    launch,
    nbytes,
    output,
    payload,
    resolve,
)
from hp_platform.group import ProcessGroup
from hp_platform.platform import Platform, get_platform
from hp_platform.protocols.tensor import Tensor

REDUCE_OPS = ("sum", "mean", "max", "min", "prod")
_SPELLINGS = {"avg": "mean", "average": "mean", "product": "prod"}


def normalize_op(op: str) -> str:
    """``op`` in our spelling: upper case and ``"avg"``, ``"product"`` are accepted; ValueError for anything else."""
    name = str(op).lower()
    name = _SPELLINGS.get(name, name)
    if name not in REDUCE_OPS:
        raise ValueError(
            f"unknown reduce operation {op!r}; expected one of {', '.join(REDUCE_OPS)} (or 'avg' for 'mean')"
        )
    return name


@overload
def all_reduce(
    x: Tensor,
    group: ProcessGroup | None = None,
    op: str = "sum",
    *,
    out: Tensor | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def all_reduce(
    x: Tensor,
    group: ProcessGroup | None = None,
    op: str = "sum",
    *,
    out: Tensor | None = None,
    async_op: Literal[True],
) -> Work[Tensor]: ...
@overload
def all_reduce(
    x: Tensor,
    group: ProcessGroup | None = None,
    op: str = "sum",
    *,
    out: Tensor | None = None,
    async_op: bool = False,
) -> Tensor | Work[Tensor]: ...
def all_reduce(
    x: Tensor,
    group: ProcessGroup | None = None,
    op: str = "sum",
    *,
    out: Tensor | None = None,
    async_op: bool = False,
) -> Tensor | Work[Tensor]:
    """The reduction of the ranks' ``x``, on all ranks.

    Args:
        x: any shape, equal on all ranks; need not be contiguous; not changed unless it is ``out``.
        group: default: the world.
        op: sum, mean (floating and complex dtypes only), max, min, prod. bool: max is "any", min is "all", others are refused.
            Complex numbers (torch): sum and mean. max and min of floating dtypes are NaN wherever a rank has NaN, on every backend.
        out: filled and returned instead of a new tensor; ``out=x`` reduces in place.
        async_op: return a :class:`Work` whose ``wait()`` gives the result.

    Communication: one all-reduce of ``x``'s bytes (twice those for max and min of 16-bit floats, which most backends compare
    as 32-bit integers); none in a group of one rank, where the result is ``x`` itself.
    Not differentiable: see :mod:`hp_platform.collectives.differentiable`.
    """
    platform, group = get_platform(), resolve(group)
    op = _checked_op(platform, op, x)
    if group.size == 1:
        return alone(platform, x, out, group, async_op)
    data = payload(platform, x)
    if out is None:
        # The payload is already our own copy where contiguous() or the bool cast had to make one.
        buffer = platform.clone(data) if platform.data_ptr(data) == platform.data_ptr(x) else data
        done: Callable[[], Tensor] = lambda: buffer  # noqa: E731
    else:
        buffer, done = output(platform, data, tuple(x.shape), out)
        if platform.data_ptr(buffer) != platform.data_ptr(data):
            platform.copy_(buffer, data)
    native, divisor = _native_op(platform, op, data, group)

    def finish() -> Tensor:
        _divide_(platform, buffer, divisor)
        return _as_bool(platform, x, done(), out)

    if 0 in x.shape:  # every rank has the same empty shape: there is nothing to tell
        return finished(finish(), group) if async_op else finish()
    return launch(
        "all_reduce",
        group,
        nbytes(platform, data),
        lambda a: platform.all_reduce_(buffer, native, group.native, a),
        finish,
        async_op,
        is_own=out is None,
    )


@overload
def reduce_scatter(
    x: Tensor,
    group: ProcessGroup | None = None,
    op: str = "sum",
    *,
    out: Tensor | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def reduce_scatter(
    x: Tensor,
    group: ProcessGroup | None = None,
    op: str = "sum",
    *,
    out: Tensor | None = None,
    async_op: Literal[True],
) -> Work[Tensor]: ...
@overload
def reduce_scatter(
    x: Tensor,
    group: ProcessGroup | None = None,
    op: str = "sum",
    *,
    out: Tensor | None = None,
    async_op: bool = False,
) -> Tensor | Work[Tensor]: ...
def reduce_scatter(
    x: Tensor,
    group: ProcessGroup | None = None,
    op: str = "sum",
    *,
    out: Tensor | None = None,
    async_op: bool = False,
) -> Tensor | Work[Tensor]:
    """This rank's block along dim 0 of the reduction of the ranks' ``x``.

    ``x`` is ``(ranks * n, ...)`` with equal shape everywhere, the result ``(n, ...)``; ValueError if dim 0 does not divide
    (use :func:`reduce_scatter_uneven`). Other arguments as in :func:`all_reduce`.

    Communication: one reduce-scatter of ``x``'s bytes; none in a group of one rank, where the result is ``x`` itself.
    """
    platform, group = get_platform(), resolve(group)
    op = _checked_op(platform, op, x)
    if x.ndim == 0 or x.shape[0] % group.size:
        raise ValueError(
            f"reduce_scatter cuts dim 0 into {group.size} equal blocks; got shape {tuple(x.shape)}: "
            "pad it, or use reduce_scatter_uneven"
        )
    if group.size == 1:
        return alone(platform, x, out, group, async_op)
    data = payload(platform, x)
    native, divisor = _native_op(platform, op, data, group)
    buffer, done = output(platform, data, (x.shape[0] // group.size, *x.shape[1:]), out)

    def finish() -> Tensor:
        _divide_(platform, buffer, divisor)
        return _as_bool(platform, x, done(), out)

    if 0 in x.shape:
        return finished(finish(), group) if async_op else finish()
    return launch(
        "reduce_scatter",
        group,
        nbytes(platform, data),
        lambda a: platform.reduce_scatter_into(buffer, data, native, group.native, a),
        finish,
        async_op,
        is_own=out is None,
    )


@overload
def reduce_scatter_uneven(
    xs: Sequence[Tensor],
    group: ProcessGroup | None = None,
    op: str = "sum",
    *,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def reduce_scatter_uneven(
    xs: Sequence[Tensor], group: ProcessGroup | None = None, op: str = "sum", *, async_op: Literal[True]
) -> Work[Tensor]: ...
def reduce_scatter_uneven(
    xs: Sequence[Tensor], group: ProcessGroup | None = None, op: str = "sum", *, async_op: bool = False
) -> Tensor | Work[Tensor]:
    """The reduction over ranks of their ``xs[this rank]``; the blocks may differ in dim 0 and be empty.

    ``xs`` holds one block per rank; block r has the same shape on all ranks. ValueError if the blocks differ in dtype or in
    another dim than the first. Communication: one reduce-scatter of all blocks' bytes.
    """
    platform, group = get_platform(), resolve(group)
    if len(xs) != group.size:
        raise ValueError(
            f"reduce_scatter_uneven needs one block per rank: got {len(xs)} for the {group.describe()}"
        )
    for i, x in enumerate(xs):
        if x.ndim == 0 or x.dtype != xs[0].dtype or tuple(x.shape[1:]) != tuple(xs[0].shape[1:]):
            raise ValueError(
                f"xs[{i}] is {tuple(x.shape)} {platform.dtype_name(x.dtype)}, xs[0] is {tuple(xs[0].shape)} "
                f"{platform.dtype_name(xs[0].dtype)}: blocks may differ in the size of dim 0 only"
            )
    op = _checked_op(platform, op, xs[0])
    mine = xs[group.rank]
    if group.size == 1:
        return alone(platform, mine, None, group, async_op)
    data = [payload(platform, x) for x in xs]
    native, divisor = _native_op(platform, op, data[0], group)
    buffer, done = output(platform, data[group.rank], tuple(mine.shape), None)

    def finish() -> Tensor:
        _divide_(platform, buffer, divisor)
        return _as_bool(platform, mine, done(), None)

    return launch(
        "reduce_scatter",
        group,
        sum(nbytes(platform, x) for x in data),
        lambda a: platform.reduce_scatter_uneven_into(buffer, data, native, group.native, a),
        finish,
        async_op,
    )


def _checked_op(platform: Platform, op: str, x: Tensor) -> str:
    name = normalize_op(op)
    if name == "mean" and not platform.is_floating(x.dtype) and not _is_complex(platform, x):
        raise ValueError(
            f"mean of {platform.dtype_name(x.dtype)} would round: cast to a floating dtype, or use sum and divide yourself"
        )
    if is_bool(platform, x) and name not in ("max", "min"):
        raise ValueError(
            f"{name} of bool has no meaning here: use max for any, min for all, or cast to an integer dtype"
        )
    return name


def _is_complex(platform: Platform, x: Tensor) -> bool:
    return platform.dtype_name(x.dtype).startswith("complex")


def _native_op(platform: Platform, op: str, x: Tensor, group: ProcessGroup) -> tuple[str, int]:
    """The operation that the backend is asked for, and what its result must be divided by."""
    kind = device_type(platform, x)
    is_complex = _is_complex(platform, x)
    if is_complex and op not in ("sum", "mean"):
        raise NotImplementedError(
            f"{op} of {platform.dtype_name(x.dtype)}: backends reduce complex numbers by sum and mean alone; gather them, and reduce what comes"
        )
    if not platform.can_reduce(x.dtype, kind):
        raise NotImplementedError(
            f"{group.backend} cannot reduce {platform.dtype_name(x.dtype)} on {kind} ({platform.platform_type.value}): "
            + (
                "reduce the real and the imaginary part"
                if is_complex
                else "cast to float32 before the collective"
            )
        )
    if op == "mean" and "mean" not in platform.native_reduce_ops(kind):
        return "sum", group.size
    return op, 1


def _divide_(platform: Platform, x: Tensor, divisor: int) -> None:
    if divisor == 1:
        return
    if divisor & (divisor - 1) == 0:  # a power of two: the product is exact, and needs no second buffer
        platform.mul_(x, 1.0 / divisor)
    else:
        platform.copy_(x, x / divisor)


def _as_bool(platform: Platform, x: Tensor, result: Tensor, out: Tensor | None) -> Tensor:
    return platform.cast(result, "bool") if out is None and is_bool(platform, x) else result
