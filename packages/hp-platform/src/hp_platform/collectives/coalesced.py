"""Several collectives of one kind in one launch: what a sharding runtime does with the parameters of a unit.

Where the backend can (NCCL, HCCL), nothing is copied. Where it cannot (gloo), the tensors travel in one buffer, cut again at
the end; the number of launches is the same. Tensors of different dtypes need one call each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
from hp_platform.collectives.reduce import _checked_op, _divide_, _native_op
from hp_platform.group import ProcessGroup
from hp_platform.platform import Platform, get_platform
from hp_platform.protocols.tensor import Tensor


def all_gather_coalesced(xs: Sequence[Tensor], group: ProcessGroup | None = None) -> Work[list[Tensor]]:
    """:func:`all_gather` of each: ``xs[i]`` is ``(n_i, ...)``, equal on all ranks; ``wait()`` gives the ``(ranks * n_i, ...)``.
    A 0-d tensor counts as ``(1,)``.

    Communication: one launch, the results' bytes; none in a group of one rank.
    """
    platform, group = get_platform(), resolve(group)
    kind = _one_kind(platform, xs, "all_gather_coalesced")
    xs = [x if x.ndim else platform.reshape(x, (1,)) for x in xs]
    if group.size == 1 or not xs:
        return finished([platform.detach(x) for x in xs], group)
    data = [payload(platform, x) for x in xs]
    truth = is_bool(platform, xs[0])
    total = sum(nbytes(platform, x) for x in data) * group.size

    if platform.can_coalesce(kind):
        outs = [
            platform.empty((group.size * x.shape[0], *x.shape[1:]), x.dtype, platform.device_of(x))
            for x in data
        ]
        return launch(
            "all_gather",
            group,
            total,
            lambda a: platform.all_gather_coalesced_into(outs, data, group.native, a),
            lambda: [platform.cast(o, "bool") for o in outs] if truth else outs,
            True,
            len(data),
        )

    flat = platform.cat([platform.reshape(x, (-1,)) for x in data])
    buffer = platform.empty((group.size * flat.shape[0],), flat.dtype, platform.device_of(flat))

    def finish() -> list[Tensor]:
        rows = platform.reshape(buffer, (group.size, flat.shape[0]))
        pieces = platform.split(rows, [math.prod(x.shape) for x in data], 1)
        # reshape copies: the pieces of a row lie apart by the length of the row
        outs = [
            platform.reshape(p, (group.size * x.shape[0], *x.shape[1:]))
            for p, x in zip(pieces, data, strict=True)
        ]
        return [platform.cast(o, "bool") for o in outs] if truth else outs

    if flat.shape[0] == 0:
        return finished(finish(), group)
    return launch(
        "all_gather",
        group,
        total,
        lambda a: platform.all_gather_into(buffer, flat, group.native, a),
        finish,
        True,
        len(data),
    )


def reduce_scatter_coalesced(
    xs: Sequence[Tensor], group: ProcessGroup | None = None, op: str = "sum"
) -> Work[list[Tensor]]:
    """:func:`reduce_scatter` of each: ``xs[i]`` is ``(ranks * n_i, ...)``; ``wait()`` gives the ``(n_i, ...)``.

    Communication: one launch, the inputs' bytes; none in a group of one rank.
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
    if group.size == 1 or not xs:
        return finished([platform.detach(x) for x in xs], group)
    data = [payload(platform, x) for x in xs]
    native, divisor = _native_op(platform, op, data[0], group)
    truth = is_bool(platform, xs[0])
    total = sum(nbytes(platform, x) for x in data)
    shapes = [(x.shape[0] // group.size, *x.shape[1:]) for x in data]

    if platform.can_coalesce(kind):
        outs = [platform.empty(s, x.dtype, platform.device_of(x)) for s, x in zip(shapes, data, strict=True)]

        def finish_each() -> list[Tensor]:
            for out in outs:
                _divide_(platform, out, divisor)
            return [platform.cast(o, "bool") for o in outs] if truth else outs

        return launch(
            "reduce_scatter",
            group,
            total,
            lambda a: platform.reduce_scatter_coalesced_into(outs, data, native, group.native, a),
            finish_each,
            True,
            len(data),
        )

    # One row per rank: row r holds rank r's block of every tensor.
    rows = platform.cat(
        [platform.reshape(x, (group.size, math.prod(s))) for x, s in zip(data, shapes, strict=True)], 1
    )
    buffer = platform.empty((rows.shape[1],), rows.dtype, platform.device_of(rows))

    def finish() -> list[Tensor]:
        _divide_(platform, buffer, divisor)
        pieces = platform.split(buffer, [math.prod(s) for s in shapes])
        outs = [platform.reshape(p, s) for p, s in zip(pieces, shapes, strict=True)]
        return [platform.cast(o, "bool") for o in outs] if truth else outs

    if rows.shape[1] == 0:
        return finished(finish(), group)
    flat = platform.reshape(rows, (-1,))
    return launch(
        "reduce_scatter",
        group,
        total,
        lambda a: platform.reduce_scatter_into(buffer, flat, native, group.native, a),
        finish,
        True,
        len(data),
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
