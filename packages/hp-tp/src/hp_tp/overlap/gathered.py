"""All-gather and product: pieces of rows are multiplied while others are on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hp_dtensor import transport
from hp_platform import collectives, get_platform
from hp_platform.halves import Halves
from hp_tp.overlap.copies import CopiedGather, halves_for, others_of, steps_of
from hp_tp.overlap.matrices import Matrices
from hp_tp.overlap.policy import OverlapPolicy
from hp_tp.overlap.side_stream import run_beside

Tensor = Any
Arrivals = Iterator[tuple[Tensor, Sequence[int]]]
"""Steps: the buffer of the whole, and the ranks (by coordinate) whose rows are in it now."""


def gather_and_multiply(
    x: Tensor,
    factors: Sequence[Tensor],
    rows: Matrices,
    policy: OverlapPolicy,
    biases: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The whole ``(outer, all rows, k)`` of the ranks' ``x (outer, own rows, k)``, and its products with the ``factors (k, m)``.

    Not recorded. Communication: one all-gather of the whole's bytes, or its equal in copies or sends; it is cut as the policy says.
    """
    platform = get_platform()
    biases = [None] * len(factors) if biases is None else biases
    device = platform.device_of(x)
    features = sum(factor.shape[1] for factor in factors)
    halves = halves_for(x.dtype, device, x.shape[-1], rows, policy)
    steps = [] if halves is None else steps_of(rows, features, policy)
    is_cut = bool(steps) or (
        halves is None
        and platform.supports("async_collectives", device)
        and policy.cuts_gather(features, len(rows.sizes))
    )
    if not (factors and is_cut):
        whole = _gathered(x, rows, halves)
        return whole, [_product(whole, factor, bias) for factor, bias in zip(factors, biases, strict=True)]
    products = [
        platform.empty((rows.outer, rows.total, factor.shape[1]), x.dtype, device) for factor in factors
    ]

    def multiply(source: Tensor, at: int, start: int, length: int) -> None:
        part = platform.narrow(source, 1, at, length)
        for product, factor, bias in zip(products, factors, biases, strict=True):
            platform.matmul_into(platform.narrow(product, 1, start, length), part, factor, bias)

    own = rows.cut.index
    arrivals = _start(x, rows, policy) if halves is None else _start_copies(x, rows, steps, halves)
    multiply(x, 0, rows.starts[own], rows.sizes[own])
    for whole, coordinates in arrivals():
        for start, length in rows.ranges(coordinates):
            multiply(whole, start, start, length)
    return whole, products


def _gathered(x: Tensor, rows: Matrices, halves: Halves | None) -> Tensor:
    """With nothing beside."""
    if halves is None:
        return rows.of_communicated(transport.gather(rows.communicated(x), rows.flat_cut))
    gather = CopiedGather(x, rows, halves, [others_of(rows)])
    gather.wait()
    return gather.whole


def _product(x: Tensor, factor: Tensor, bias: Tensor | None) -> Tensor:
    platform = get_platform()
    if bias is None:
        return platform.matmul(x, factor)
    return platform.linear(x, platform.transpose(factor, 0, 1), bias)


def _start(x: Tensor, rows: Matrices, policy: OverlapPolicy) -> Callable[[], Arrivals]:
    """Launch the communication; what it gives waits for its steps."""
    if policy.gather_by == "sends" and rows.outer == 1:
        return _start_sends(x, rows)
    if rows.flat_cut.is_even:
        return _start_all_gather(x, rows)
    return _start_any_gather(x, rows)


def _start_copies(
    x: Tensor, rows: Matrices, steps: list[list[int]], halves: Halves
) -> Callable[[], Arrivals]:
    """The other ranks' pieces come into their places one by one, or some together where they are short."""
    gather = CopiedGather(x, rows, halves, steps)

    def arrivals() -> Arrivals:
        for number, coordinates in enumerate(steps):
            gather.wait_step(number)
            yield gather.whole, coordinates
        gather.wait()

    return arrivals


def _others(rows: Matrices) -> list[int]:
    return [coordinate for coordinate in range(len(rows.sizes)) if coordinate != rows.cut.index]


def _start_all_gather(x: Tensor, rows: Matrices) -> Callable[[], Arrivals]:
    """With one outer matrix straight into the whole; several blocks of each rank are put in their places when they have come."""
    platform = get_platform()
    features, num_ranks, group = x.shape[-1], len(rows.sizes), rows.cut.group
    piece = platform.reshape(platform.detach(x), (rows.outer * rows.sizes[0], features))
    target = platform.empty((num_ranks * piece.shape[0], features), x.dtype, platform.device_of(x))
    task = run_beside(
        platform.device_of(x),
        lambda async_op: collectives.all_gather(piece, group, out=target, async_op=async_op),
        (piece, target),
    )

    def arrivals() -> Arrivals:
        task.wait()
        whole = platform.reshape(target, (num_ranks, rows.outer, rows.sizes[0], features))
        if rows.outer != 1:
            whole = platform.contiguous(platform.transpose(whole, 0, 1))
        yield platform.reshape(whole, (rows.outer, rows.total, features)), _others(rows)

    return arrivals


def _start_any_gather(x: Tensor, rows: Matrices) -> Callable[[], Arrivals]:
    """Pieces of several sizes, or from ranks in another order: they are put together when they have come."""
    pending = transport.gather(rows.communicated(x), rows.flat_cut, async_op=True)

    def arrivals() -> Arrivals:
        yield rows.of_communicated(pending.wait()), _others(rows)

    return arrivals


def _start_sends(x: Tensor, rows: Matrices) -> Callable[[], Arrivals]:
    """In step s the own piece goes to the s-th rank behind, and that of the s-th before comes."""
    platform = get_platform()
    cut, num_ranks = rows.cut, len(rows.sizes)
    sent = rows.communicated(platform.detach(x))
    whole = platform.empty((1, rows.total, x.shape[-1]), x.dtype, platform.device_of(x))
    pieces = platform.split(rows.communicated(whole), list(rows.sizes))
    tasks = []
    for step in range(1, num_ranks):
        target, source = (cut.index + step) % num_ranks, (cut.index - step) % num_ranks
        ops = []
        if 0 not in sent.shape:
            ops.append(collectives.P2POp("send", sent, cut.group.ranks[cut.positions[target]]))
        if 0 not in pieces[source].shape:
            peer = cut.group.ranks[cut.positions[source]]
            ops.append(collectives.P2POp("recv", pieces[source], peer, is_target=True))
        task = run_beside(platform.device_of(x), _sending(ops, cut.group), (sent, whole))
        tasks.append((task, source))

    def arrivals() -> Arrivals:
        platform.copy_(pieces[cut.index], sent)
        for task, source in tasks:
            task.wait()
            yield whole, [source]
        if not tasks:
            yield whole, []

    return arrivals


def _sending(ops: list[Any], group: Any) -> Callable[[bool], Any]:
    return lambda async_op: collectives.batch_send_recv(ops, group)
