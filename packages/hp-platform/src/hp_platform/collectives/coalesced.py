"""Several collectives of one kind in one launch: what a sharding runtime does with the parameters of a unit.

Where the backend can (NCCL, HCCL), nothing is copied. Where it cannot (gloo), several tensors travel in one buffer, cut again
at the end; the number of launches is the same. Tensors of different dtypes need one call each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, overload

from hp_platform.collectives._launch import (
    Work,
    device_type,
    finished,
    is_bool,
    launch,
    nbytes,
    payload,
    resolve,
)
from hp_platform.collectives._outs import all_alone, buffers_for, check_outs, delivered, ended
from hp_platform.collectives.reduce import _checked_op, _divide_, _native_op
from hp_platform.group import ProcessGroup
from hp_platform.platform import Platform, get_platform
from hp_platform.protocols.comm import NativeWork
from hp_platform.protocols.tensor import Tensor


@overload
def all_gather_coalesced(
    xs: Sequence[Tensor],
    group: ProcessGroup | None = None,
    *,
    outs: Sequence[Tensor] | None = None,
    async_op: Literal[True] = True,
) -> Work[list[Tensor]]: ...
@overload
def all_gather_coalesced(
    xs: Sequence[Tensor],
    group: ProcessGroup | None = None,
    *,
    outs: Sequence[Tensor] | None = None,
    async_op: Literal[False],
) -> list[Tensor]: ...
@overload
def all_gather_coalesced(
    xs: Sequence[Tensor],
    group: ProcessGroup | None = None,
    *,
    outs: Sequence[Tensor] | None = None,
    async_op: bool = True,
) -> list[Tensor] | Work[list[Tensor]]: ...
def all_gather_coalesced(
    xs: Sequence[Tensor],
    group: ProcessGroup | None = None,
    *,
    outs: Sequence[Tensor] | None = None,
    async_op: bool = True,
) -> list[Tensor] | Work[list[Tensor]]:
    """:func:`all_gather` of each: ``xs[i]`` is ``(n_i, ...)``, equal on all ranks, the i-th result ``(ranks * n_i, ...)``.

    Args:
        xs: of one dtype, on one kind of device; a 0-d tensor counts as ``(1,)``.
        group: default: the world.
        outs: filled and returned instead of new tensors: contiguous, of the results' shapes and dtype, also views of a larger
            tensor (:func:`~hp_platform.require` "write_into_view"). ``xs[i]`` may be this rank's block of ``outs[i]``.
        async_op: True: a :class:`Work` whose ``wait()`` gives the list. False: the list, after a launch that runs on the
            current stream where the device has streams, so that nothing waits for another one.

    Communication: one launch, the results' bytes; none in a group of one rank, where ``xs`` are copied into ``outs``, or are
    the results themselves. ValueError for ``outs`` that do not fit.
    """
    platform, group = get_platform(), resolve(group)
    kind = _one_kind(platform, xs, "all_gather_coalesced")
    xs = [x if x.ndim else platform.reshape(x, (1,)) for x in xs]
    shapes = [(group.size * x.shape[0], *x.shape[1:]) for x in xs]
    check_outs(platform, xs, shapes, outs)
    if group.size == 1 or not xs:
        return ended(all_alone(platform, xs, outs), group, async_op)
    data = [payload(platform, x) for x in xs]
    truth = is_bool(platform, xs[0])
    total = sum(nbytes(platform, x) for x in data) * group.size

    if total == 0 or len(data) == 1 or platform.can_coalesce(kind):
        buffers, finish = buffers_for(platform, data, shapes, outs, truth)

        def start(is_async: bool) -> NativeWork | None:
            if len(data) == 1:
                return platform.all_gather_into(buffers[0], data[0], group.native, is_async)
            return platform.all_gather_coalesced_into(buffers, data, group.native, is_async)

        if total == 0:
            return ended(finish(), group, async_op)
        return launch("all_gather", group, total, start, finish, async_op, len(data), is_own=outs is None)

    flat = platform.cat([platform.reshape(x, (-1,)) for x in data])
    buffer = platform.empty((group.size * flat.shape[0],), flat.dtype, platform.device_of(flat))

    def cut() -> list[Tensor]:
        rows = platform.reshape(buffer, (group.size, flat.shape[0]))
        pieces = platform.split(rows, [math.prod(x.shape) for x in data], 1)
        # reshape copies: the pieces of a row lie apart by the length of the row
        results = [platform.reshape(p, s) for p, s in zip(pieces, shapes, strict=True)]
        return delivered(platform, results, outs, truth)

    return launch(
        "all_gather",
        group,
        total,
        lambda a: platform.all_gather_into(buffer, flat, group.native, a),
        cut,
        async_op,
        len(data),
        is_own=outs is None,
    )


@overload
def reduce_scatter_coalesced(
    xs: Sequence[Tensor],
    group: ProcessGroup | None = None,
    op: str = "sum",
    *,
    outs: Sequence[Tensor] | None = None,
    async_op: Literal[True] = True,
) -> Work[list[Tensor]]: ...
@overload
def reduce_scatter_coalesced(
    xs: Sequence[Tensor],
    group: ProcessGroup | None = None,
    op: str = "sum",
    *,
    outs: Sequence[Tensor] | None = None,
    async_op: Literal[False],
) -> list[Tensor]: ...
@overload
def reduce_scatter_coalesced(
    xs: Sequence[Tensor],
    group: ProcessGroup | None = None,
    op: str = "sum",
    *,
    outs: Sequence[Tensor] | None = None,
    async_op: bool = True,
) -> list[Tensor] | Work[list[Tensor]]: ...
def reduce_scatter_coalesced(
    xs: Sequence[Tensor],
    group: ProcessGroup | None = None,
    op: str = "sum",
    *,
    outs: Sequence[Tensor] | None = None,
    async_op: bool = True,
) -> list[Tensor] | Work[list[Tensor]]:
    """:func:`reduce_scatter` of each: ``xs[i]`` is ``(ranks * n_i, ...)``, the i-th result ``(n_i, ...)``.

    ``outs`` and ``async_op`` as of :func:`all_gather_coalesced`; ``outs[i]`` may be this rank's block of ``xs[i]``.

    Communication: one launch, the inputs' bytes; none in a group of one rank, where ``xs`` are copied into ``outs``, or are
    the results themselves. ValueError for ``outs`` that do not fit, and for a dim 0 that is no multiple of the ranks.
    """
    platform, group = get_platform(), resolve(group)
    kind = _one_kind(platform, xs, "reduce_scatter_coalesced")
    if xs:
        op = _checked_op(platform, op, xs[0])
    for i, x in enumerate(xs):
        if x.ndim == 0 or x.shape[0] % group.size:
            raise ValueError(
                f"xs[{i}] has shape {tuple(x.shape)}: dim 0 must be a multiple of the {group.size} ranks; pad it"
            )
    shapes = [(x.shape[0] // group.size, *x.shape[1:]) for x in xs]
    check_outs(platform, xs, shapes, outs)
    if group.size == 1 or not xs:
        return ended(all_alone(platform, xs, outs), group, async_op)
    data = [payload(platform, x) for x in xs]
    native, divisor = _native_op(platform, op, data[0], group)
    truth = is_bool(platform, xs[0])
    total = sum(nbytes(platform, x) for x in data)

    if total == 0 or len(data) == 1 or platform.can_coalesce(kind):
        buffers, done = buffers_for(platform, data, shapes, outs, truth)

        def start(is_async: bool) -> NativeWork | None:
            if len(data) == 1:
                return platform.reduce_scatter_into(buffers[0], data[0], native, group.native, is_async)
            return platform.reduce_scatter_coalesced_into(buffers, data, native, group.native, is_async)

        def finish() -> list[Tensor]:
            for out in buffers:
                _divide_(platform, out, divisor)
            return done()

        if total == 0:
            return ended(done(), group, async_op)
        return launch("reduce_scatter", group, total, start, finish, async_op, len(data), is_own=outs is None)

    # One row per rank: row r holds rank r's block of every tensor.
    rows = platform.cat(
        [platform.reshape(x, (group.size, math.prod(s))) for x, s in zip(data, shapes, strict=True)], 1
    )
    buffer = platform.empty((rows.shape[1],), rows.dtype, platform.device_of(rows))
    flat = platform.reshape(rows, (-1,))

    def cut() -> list[Tensor]:
        _divide_(platform, buffer, divisor)
        pieces = platform.split(buffer, [math.prod(s) for s in shapes])
        results = [platform.reshape(p, s) for p, s in zip(pieces, shapes, strict=True)]
        return delivered(platform, results, outs, truth)

    return launch(
        "reduce_scatter",
        group,
        total,
        lambda a: platform.reduce_scatter_into(buffer, flat, native, group.native, a),
        cut,
        async_op,
        len(data),
        is_own=outs is None,
    )


def all_reduce_coalesced(
    xs: Sequence[Tensor], group: ProcessGroup | None = None, op: str = "sum"
) -> Work[list[Tensor]]:
    """:func:`all_reduce` of each, out of place. Communication: one launch, the inputs' bytes; none in a group of one rank."""
    platform, group = get_platform(), resolve(group)
    kind = _one_kind(platform, xs, "all_reduce_coalesced")
    if xs:
        op = _checked_op(platform, op, xs[0])
    if group.size == 1 or not xs:
        return finished([platform.detach(x) for x in xs], group)
    data = [payload(platform, x) for x in xs]
    native, divisor = _native_op(platform, op, data[0], group)
    truth = is_bool(platform, xs[0])
    total = sum(nbytes(platform, x) for x in data)

    if platform.can_coalesce(kind):
        outs = [platform.clone(x) for x in data]

        def finish_each() -> list[Tensor]:
            for out in outs:
                _divide_(platform, out, divisor)
            return [platform.cast(o, "bool") for o in outs] if truth else outs

        return launch(
            "all_reduce",
            group,
            total,
            lambda a: platform.all_reduce_coalesced_(outs, native, group.native, a),
            finish_each,
            True,
            len(data),
        )

    flat = platform.cat([platform.reshape(x, (-1,)) for x in data])

    def finish() -> list[Tensor]:
        _divide_(platform, flat, divisor)
        pieces = platform.split(flat, [math.prod(x.shape) for x in data])
        outs = [platform.reshape(p, tuple(x.shape)) for p, x in zip(pieces, data, strict=True)]
        return [platform.cast(o, "bool") for o in outs] if truth else outs

    if flat.shape[0] == 0:
        return finished(finish(), group)
    return launch(
        "all_reduce",
        group,
        total,
        lambda a: platform.all_reduce_(flat, native, group.native, a),
        finish,
        True,
        len(data),
    )


def _one_kind(platform: Platform, xs: Sequence[Tensor], name: str) -> str:
    dtypes = {platform.dtype_name(x.dtype) for x in xs}
    if len(dtypes) > 1:
        raise ValueError(
            f"{name} needs one dtype per call, got {', '.join(sorted(dtypes))}: group the tensors by dtype"
        )
    kinds = {device_type(platform, x) for x in xs}
    if len(kinds) > 1:
        raise ValueError(f"{name} needs all tensors on one kind of device, got {', '.join(sorted(kinds))}")
    return kinds.pop() if kinds else "cpu"
