"""Between pairs of ranks: all_to_all, send, recv, several at once; and the barrier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

from hp_platform.collectives._launch import (
    Work,
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
def all_to_all(
    x: Tensor,
    group: ProcessGroup | None = None,
    *,
    in_sizes: Sequence[int] | None = None,
    out_sizes: Sequence[int] | None = None,
    async_op: Literal[False] = False,
) -> Tensor: ...
@overload
def all_to_all(
    x: Tensor,
    group: ProcessGroup | None = None,
    *,
    in_sizes: Sequence[int] | None = None,
    out_sizes: Sequence[int] | None = None,
    async_op: Literal[True],
) -> Work[Tensor]: ...
def all_to_all(
    x: Tensor,
    group: ProcessGroup | None = None,
    *,
    in_sizes: Sequence[int] | None = None,
    out_sizes: Sequence[int] | None = None,
    async_op: bool = False,
) -> Tensor | Work[Tensor]:
    """Every rank sends a block of rows to every rank, and stacks what it gets in the order of ranks.

    Args:
        x: ``(sum(in_sizes), ...)``; rows along dim 0.
        in_sizes: rows for each rank; default: equal blocks (ValueError if dim 0 does not divide).
        out_sizes: rows from each rank; default: equal blocks. Rank a's ``in_sizes[b]`` must be rank b's ``out_sizes[a]``;
            each rank gives its own two lists, both or neither. 0 is allowed.

    Returns ``(sum(out_sizes), ...)``. Communication: one all-to-all of ``x``'s bytes; none in a group of one rank.
    """
    platform, group = get_platform(), resolve(group)
    in_sizes, out_sizes = _sizes(x, group, in_sizes, out_sizes)
    if group.size == 1:
        return finished(platform.detach(x), group) if async_op else platform.detach(x)
    data = payload(platform, x)
    buffer, done = output(platform, data, (sum(out_sizes), *x.shape[1:]), None)
    truth = is_bool(platform, x)

    def finish() -> Tensor:
        return platform.cast(done(), "bool") if truth else done()

    return launch(
        "all_to_all",
        group,
        nbytes(platform, data),
        lambda a: platform.all_to_all_into(buffer, data, out_sizes, in_sizes, group.native, a),
        finish,
        async_op,
    )


def _sizes(
    x: Tensor, group: ProcessGroup, in_sizes: Sequence[int] | None, out_sizes: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """Rows to and from each rank; ValueError if they cannot be."""
    rows = x.shape[0] if x.ndim else 0
    if (in_sizes is None) != (out_sizes is None):
        raise ValueError("give both in_sizes and out_sizes, or neither")
    if in_sizes is None or out_sizes is None:
        if x.ndim == 0 or rows % group.size:
            raise ValueError(
                f"all_to_all cuts dim 0 into {group.size} equal blocks; got shape {tuple(x.shape)}: give in_sizes and out_sizes"
            )
        even = [rows // group.size] * group.size
        return even, even
    if len(in_sizes) != group.size or len(out_sizes) != group.size:
        raise ValueError(
            f"in_sizes and out_sizes need {group.size} entries each; got {len(in_sizes)} and {len(out_sizes)}"
        )
    if min(*in_sizes, *out_sizes) < 0:
        raise ValueError(
            f"sizes are numbers of rows, 0 or more; got in_sizes {list(in_sizes)} and out_sizes {list(out_sizes)}"
        )
    if x.ndim == 0:
        raise ValueError("all_to_all sends rows along dim 0; got a 0-d tensor: reshape it to (1,)")
    if sum(in_sizes) != rows:
        raise ValueError(f"in_sizes {list(in_sizes)} add up to {sum(in_sizes)}, but x has {rows} rows")
    if in_sizes[group.rank] != out_sizes[group.rank]:
        raise ValueError(
            f"rank {group.rank} of the group sends itself {in_sizes[group.rank]} rows and expects {out_sizes[group.rank]}: must be equal"
        )
    return list(in_sizes), list(out_sizes)


def send(
    x: Tensor, dst: int, group: ProcessGroup | None = None, *, async_op: bool = False
) -> Work[None] | None:
    """Send ``x`` to global rank ``dst``, which calls :func:`recv`. Communication: ``x``'s bytes to one peer.

    ValueError if ``dst`` is this rank or not in the group. Matched by order between the two ranks; there are no tags.
    """
    platform, group = get_platform(), resolve(group)
    _check_peer(group, dst, "dst")
    data = payload(platform, x)
    return launch(
        "send",
        group,
        nbytes(platform, data),
        lambda a: platform.send(data, dst, group.native, a),
        lambda: None,
        async_op,
    )


@overload
def recv(
    like: Tensor, src: int, group: ProcessGroup | None = None, *, async_op: Literal[False] = False
) -> Tensor: ...
@overload
def recv(
    like: Tensor, src: int, group: ProcessGroup | None = None, *, async_op: Literal[True]
) -> Work[Tensor]: ...
def recv(
    like: Tensor, src: int, group: ProcessGroup | None = None, *, async_op: bool = False
) -> Tensor | Work[Tensor]:
    """A new tensor with the shape, dtype and device of ``like``, filled by global rank ``src``'s :func:`send`."""
    platform, group = get_platform(), resolve(group)
    _check_peer(group, src, "src")
    truth = is_bool(platform, like)
    buffer = platform.empty(tuple(like.shape), "uint8" if truth else like.dtype, platform.device_of(like))

    def finish() -> Tensor:
        return platform.cast(buffer, "bool") if truth else buffer

    return launch(
        "recv",
        group,
        nbytes(platform, buffer),
        lambda a: platform.recv_(buffer, src, group.native, a),
        finish,
        async_op,
    )


@dataclass(frozen=True)
class P2POp:
    """One transfer of :func:`batch_send_recv`: for ``"send"`` the tensor goes to ``peer``; for ``"recv"`` a tensor like it comes."""

    kind: Literal["send", "recv"]
    tensor: Tensor
    peer: int
    is_target: bool = False
    """For ``"recv"``: ``tensor`` itself is filled, and given back by ``wait()``; it must be contiguous, and may be a view where
    ``supports("write_into_view")``."""


def batch_send_recv(ops: Sequence[P2POp], group: ProcessGroup | None = None) -> Work[list[Tensor]]:
    """Start several transfers at once, in no order that could block; ``wait()`` gives the received tensors in the order of ``ops``.

    Ranks that send to each other in one batch do not deadlock. Communication: the bytes of all tensors, one launch.
    """
    platform, group = get_platform(), resolve(group)
    raw: list[tuple[Literal["send", "recv"], Tensor, int]] = []
    received: list[tuple[Tensor, bool]] = []
    for op in ops:
        if op.kind not in ("send", "recv"):
            raise ValueError(f"a transfer is 'send' or 'recv', got {op.kind!r}")
        _check_peer(group, op.peer, "peer")
        if op.kind == "send":
            raw.append(("send", payload(platform, op.tensor), op.peer))
        else:
            truth = is_bool(platform, op.tensor)
            if op.is_target:
                buffer, truth = _target(platform, op.tensor, truth), False
            else:
                buffer = platform.empty(
                    tuple(op.tensor.shape),
                    "uint8" if truth else op.tensor.dtype,
                    platform.device_of(op.tensor),
                )
            received.append((buffer, truth))
            raw.append(("recv", buffer, op.peer))

    def finish() -> list[Tensor]:
        return [platform.cast(b, "bool") if truth else b for b, truth in received]

    if not raw:
        return finished(finish(), group)
    return launch(
        "batch_send_recv",
        group,
        sum(nbytes(platform, x) for _, x, _ in raw),
        lambda a: _All(platform.batch_p2p(raw, group.native)),
        finish,
        True,
        len(raw),
        is_own=not any(op.is_target for op in ops),
    )


def barrier(group: ProcessGroup | None = None) -> None:
    """Return when every rank of the group has called it. On accelerators the device's work before it is done as well."""
    platform, group = get_platform(), resolve(group)
    if group.size > 1:
        launch("barrier", group, 0, lambda a: platform.barrier(group.native, a), lambda: None, False)


class _All:
    """Several native handles as one."""

    def __init__(self, works: Sequence) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _target(platform: Platform, x: Tensor, is_truth: bool) -> Tensor:
    """What a transfer fills, outside of the graph."""
    if is_truth or not platform.is_contiguous(x):
        raise ValueError(
            f"is_target=True fills contiguous tensors of other dtypes than bool; got shape {tuple(x.shape)} "
            f"{platform.dtype_name(x.dtype)}: receive a new tensor, and copy it"
        )
    return platform.detach(x)


def _check_peer(group: ProcessGroup, peer: int, name: str) -> None:
    check_member(group, peer, name)
    if peer == group.global_rank:
        raise ValueError(f"{name} {peer} is this rank itself: a rank does not send to itself")
