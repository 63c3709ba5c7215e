"""Moving whole tensors between ranks: all_gather, broadcast, scatter, gather. Bit-exact for every dtype, bool included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, overload

from hp_platform.collectives._launch import (
    Work,
    alone,
    check_member,
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


@overload
def all_gather(
    x: Tensor,
    group: ProcessGroup | None = None,
    *,
    out: Tensor | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def all_gather(
    x: Tensor, group: ProcessGroup | None = None, *, out: Tensor | None = None, async_op: Literal[True]
) -> Work[Tensor]: ...
@overload
def all_gather(
    x: Tensor, group: ProcessGroup | None = None, *, out: Tensor | None = None, async_op: bool = False
) -> Tensor | Work[Tensor]: ...
def all_gather(
    x: Tensor, group: ProcessGroup | None = None, *, out: Tensor | None = None, async_op: bool = False
) -> Tensor | Work[Tensor]:
    """The ranks' ``x`` one after the other along dim 0, on all ranks.

    ``x`` is ``(n, ...)`` with equal shape on all ranks (a 0-d tensor counts as ``(1,)``), the result ``(ranks * n, ...)``;
    ``out`` is filled and returned if given. Communication: one all-gather of the result's bytes; none in a group of one rank,
    where the result is ``x`` itself. For different sizes: :func:`all_gather_uneven`.
    """
    platform, group = get_platform(), resolve(group)
    if x.ndim == 0:
        x = platform.reshape(x, (1,))
    if group.size == 1:
        return alone(platform, x, out, group, async_op)
    data = payload(platform, x)
    buffer, done = output(platform, data, (group.size * x.shape[0], *x.shape[1:]), out)
    finish = _finisher(platform, x, done, out)
    if 0 in x.shape:
        return finished(finish(), group) if async_op else finish()
    return launch(
        "all_gather",
        group,
        nbytes(platform, data) * group.size,
        lambda a: platform.all_gather_into(buffer, data, group.native, a),
        finish,
        async_op,
        is_own=out is None,
    )


@overload
def all_gather_uneven(
    x: Tensor, sizes: Sequence[int], group: ProcessGroup | None = None, *, async_op: Literal[False] = False
) -> list[Tensor]: ...
@overload
def all_gather_uneven(
    x: Tensor, sizes: Sequence[int], group: ProcessGroup | None = None, *, async_op: Literal[True]
) -> Work[list[Tensor]]: ...
def all_gather_uneven(
    x: Tensor, sizes: Sequence[int], group: ProcessGroup | None = None, *, async_op: bool = False
) -> list[Tensor] | Work[list[Tensor]]:
    """The ranks' tensors, which differ in dim 0: rank r's is ``(sizes[r], ...)``; sizes may be 0.

    ``sizes`` is known to every rank (no metadata is exchanged); ValueError if ``x`` does not have this rank's size.
    Communication: one all-gather of all tensors' bytes (backends without an uneven one pad to the largest).
    """
    platform, group = get_platform(), resolve(group)
    if len(sizes) != group.size:
        raise ValueError(f"sizes needs one entry per rank: got {len(sizes)} for the {group.describe()}")
    if min(sizes) < 0:
        raise ValueError(f"sizes are numbers of rows, 0 or more; got {list(sizes)}")
    if x.ndim == 0 or x.shape[0] != sizes[group.rank]:
        raise ValueError(
            f"this is rank {group.rank} of the group, whose size is {sizes[group.rank]}; got shape {tuple(x.shape)}"
        )
    if group.size == 1:
        return finished([platform.detach(x)], group) if async_op else [platform.detach(x)]
    data = payload(platform, x)
    device = platform.device_of(data)
    buffers = [platform.empty((size, *x.shape[1:]), data.dtype, device) for size in sizes]
    truth = is_bool(platform, x)

    def finish() -> list[Tensor]:
        return [platform.cast(b, "bool") for b in buffers] if truth else buffers

    if sum(sizes) == 0 or 0 in x.shape[1:]:
        return finished(finish(), group) if async_op else finish()
    return launch(
        "all_gather",
        group,
        sum(nbytes(platform, b) for b in buffers),
        lambda a: platform.all_gather_uneven_into(buffers, data, group.native, a),
        finish,
        async_op,
    )


@overload
def broadcast(
    x: Tensor,
    src: int,
    group: ProcessGroup | None = None,
    *,
    out: Tensor | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def broadcast(
    x: Tensor,
    src: int,
    group: ProcessGroup | None = None,
    *,
    out: Tensor | None = None,
    async_op: Literal[True],
) -> Work[Tensor]: ...
def broadcast(
    x: Tensor,
    src: int,
    group: ProcessGroup | None = None,
    *,
    out: Tensor | None = None,
    async_op: bool = False,
) -> Tensor | Work[Tensor]:
    """Rank ``src``'s ``x`` on all ranks. ``src`` is a global rank.

    ``x`` has the same shape and dtype everywhere and is not changed unless ``out=x``. Communication: one broadcast of ``x``'s bytes.
    """
    platform, group = get_platform(), resolve(group)
    check_member(group, src, "src")
    if group.size == 1:
        return alone(platform, x, out, group, async_op)
    data = payload(platform, x)
    if out is None and platform.data_ptr(data) != platform.data_ptr(x):
        buffer, done = data, lambda: data  # contiguous() or the bool cast has made a copy of our own
    else:
        buffer, done = output(platform, data, tuple(x.shape), out)
        if platform.data_ptr(buffer) != platform.data_ptr(data):
            platform.copy_(buffer, data)
    finish = _finisher(platform, x, done, out)
    if 0 in x.shape:
        return finished(finish(), group) if async_op else finish()
    return launch(
        "broadcast",
        group,
        nbytes(platform, data),
        lambda a: platform.broadcast_(buffer, src, group.native, a),
        finish,
        async_op,
        is_own=out is None,
    )


@overload
def scatter(
    xs: Sequence[Tensor] | None,
    like: Tensor,
    src: int,
    group: ProcessGroup | None = None,
    *,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def scatter(
    xs: Sequence[Tensor] | None,
    like: Tensor,
    src: int,
    group: ProcessGroup | None = None,
    *,
    async_op: Literal[True],
) -> Work[Tensor]: ...
def scatter(
    xs: Sequence[Tensor] | None,
    like: Tensor,
    src: int,
    group: ProcessGroup | None = None,
    *,
    async_op: bool = False,
) -> Tensor | Work[Tensor]:
    """This rank's entry of the list ``xs`` of rank ``src`` (one tensor per rank, all like ``like`` in shape, dtype, device).

    ``xs`` is read on ``src`` only and may be None elsewhere; ``like`` is never read or changed.
    Communication: one scatter of the list's bytes.
    """
    platform, group = get_platform(), resolve(group)
    check_member(group, src, "src")
    here = src == group.global_rank
    if here:
        if xs is None or len(xs) != group.size:
            given = "None" if xs is None else f"{len(xs)} tensors"
            raise ValueError(
                f"the source of a scatter gives one tensor per rank: got {given} for the {group.describe()}"
            )
        for i, x in enumerate(xs):
            if tuple(x.shape) != tuple(like.shape) or x.dtype != like.dtype:
                own, wanted = platform.dtype_name(x.dtype), platform.dtype_name(like.dtype)
                raise ValueError(
                    f"xs[{i}] is {tuple(x.shape)} {own}, like is {tuple(like.shape)} {wanted}: all must be alike"
                )
    if group.size == 1:
        assert xs is not None
        return finished(platform.detach(xs[0]), group) if async_op else platform.detach(xs[0])
    data = [payload(platform, x) for x in xs] if here and xs is not None else None
    wire = "uint8" if is_bool(platform, like) else like.dtype
    buffer = platform.empty(tuple(like.shape), wire, platform.device_of(like))
    finish = _finisher(platform, like, lambda: buffer, None)
    if 0 in like.shape:
        return finished(finish(), group) if async_op else finish()
    return launch(
        "scatter",
        group,
        nbytes(platform, buffer) * group.size,
        lambda a: platform.scatter_into(buffer, data, src, group.native, a),
        finish,
        async_op,
    )


@overload
def gather(
    x: Tensor, dst: int, group: ProcessGroup | None = None, *, async_op: Literal[False] = False
) -> list[Tensor] | None: ...
@overload
def gather(
    x: Tensor, dst: int, group: ProcessGroup | None = None, *, async_op: Literal[True]
) -> Work[list[Tensor] | None]: ...
def gather(
    x: Tensor, dst: int, group: ProcessGroup | None = None, *, async_op: bool = False
) -> list[Tensor] | Work[list[Tensor] | None] | None:
    """On rank ``dst`` the list of the ranks' ``x`` (equal shapes), None elsewhere. Communication: one gather of the list's bytes."""
    platform, group = get_platform(), resolve(group)
    check_member(group, dst, "dst")
    here = dst == group.global_rank
    if group.size == 1:
        return finished([platform.detach(x)], group) if async_op else [platform.detach(x)]
    data = payload(platform, x)
    buffers = (
        [platform.empty(tuple(x.shape), data.dtype, platform.device_of(data)) for _ in group.ranks]
        if here
        else None
    )
    truth = is_bool(platform, x)

    def finish() -> list[Tensor] | None:
        return [platform.cast(b, "bool") for b in buffers] if buffers and truth else buffers

    if 0 in x.shape:
        return finished(finish(), group) if async_op else finish()
    return launch(
        "gather",
        group,
        nbytes(platform, data) * group.size,
        lambda a: platform.gather_into(buffers, data, dst, group.native, a),
        finish,
        async_op,
    )


def _finisher(
    platform: Platform, x: Tensor, done: Callable[[], Tensor], out: Tensor | None
) -> Callable[[], Tensor]:
    if out is None and is_bool(platform, x):
        return lambda: platform.cast(done(), "bool")
    return done
