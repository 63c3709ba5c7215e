"""Product and reduce-scatter: chunks of rows are reduced while the next ones are multiplied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor import transport
from hp_dtensor.chunk import chunk_offset, chunk_size
from hp_platform import collectives, get_platform
from hp_tp.overlap.copies import CopiedExchange, halves_for, others_of, steps_of
from hp_tp.overlap.matrices import Matrices
from hp_tp.overlap.policy import OverlapPolicy
from hp_tp.overlap.side_stream import Task, run_beside

Tensor = Any


def multiply_and_scatter(
    xs: Sequence[Tensor],
    factors: Sequence[Tensor],
    rows: Matrices,
    policy: OverlapPolicy,
    *,
    summand: Tensor | None = None,
    has_work_beside: bool = False,
) -> Callable[[], Tensor]:
    """The own rows ``(outer, own rows, m)`` of the ranks' sum of ``sum(x (outer, all rows, k) @ factor (k, m)) + summand``.

    Not recorded. What is returned waits for it: with ``has_work_beside`` the caller has something to compute before, and
    nothing is cut. Communication: one reduce-scatter of the summand's bytes, or its equal in copies, in as many launches as the policy
    says.
    """
    platform = get_platform()
    like: Tensor = xs[0] if xs else summand
    features = factors[0].shape[1] if xs else like.shape[-1]
    halves = halves_for(like.dtype, platform.device_of(like), features, rows, policy)
    if halves is not None:
        exchange = CopiedExchange(rows, features, like.dtype, platform.device_of(like), halves)
        steps = [] if has_work_beside or not xs else steps_of(rows, features, policy)
        if not steps:
            return _sent_at_once(_total(xs, factors, summand), exchange, rows)
        return _sent_while_multiplied(xs, factors, summand, exchange, rows, steps)
    if xs and rows.flat_cut.is_even and not has_work_beside:
        num_chunks = _num_chunks(xs[0], factors[0].shape[1], rows, policy)
        if num_chunks > 1:
            return _in_chunks(xs, factors, rows, num_chunks, summand)
    return reduce_beside(_total(xs, factors, summand), rows)


def _total(xs: Sequence[Tensor], factors: Sequence[Tensor], summand: Tensor | None) -> Tensor:
    platform = get_platform()
    total = summand
    for x, factor in zip(xs, factors, strict=True):
        # The first product of our own is ours to write to; a given summand belongs to the caller.
        if total is None or total is summand:
            product = platform.matmul(x, factor)
            total = product if total is None else platform.add_(product, total)
        else:
            platform.matmul_into(total, x, factor, total)
    return total


def _sent_at_once(total: Tensor, exchange: CopiedExchange, rows: Matrices) -> Callable[[], Tensor]:
    exchange.send(total, 0, [*others_of(rows), rows.cut.index])
    exchange.meet()
    return exchange.add_up(is_beside=True)


def _sent_while_multiplied(
    xs: Sequence[Tensor],
    factors: Sequence[Tensor],
    summand: Tensor | None,
    exchange: CopiedExchange,
    rows: Matrices,
    steps: list[list[int]],
) -> Callable[[], Tensor]:
    """The products for the other ranks come first, so that they are on their way while the own one, the last, is computed."""
    platform, own = get_platform(), rows.cut.index

    def multiply(out: Tensor, start: int, length: int) -> None:
        out = rows.communicated(out)  # of one matrix a plain one
        added = None if summand is None else rows.communicated(platform.narrow(summand, 1, start, length))
        for x, factor in zip(xs, factors, strict=True):
            part = rows.communicated(platform.narrow(x, 1, start, length))
            platform.matmul_into(out, part, factor, added)
            added = out

    kind = {"dtype": xs[0].dtype, "device": platform.device_of(xs[0])}
    for coordinates in steps:
        for start, length in rows.ranges(coordinates):
            product = platform.empty((rows.outer, length, factors[0].shape[1]), **kind)
            multiply(product, start, length)
            those = [each for each in coordinates if start <= rows.starts[each] < start + length]
            exchange.send(product, start, those)
    exchange.meet()
    if rows.sizes[own]:
        multiply(exchange.own, rows.starts[own], rows.sizes[own])
    return exchange.add_up(is_beside=False)


def _num_chunks(x: Tensor, features: int, rows: Matrices, policy: OverlapPolicy) -> int:
    platform = get_platform()
    if not platform.supports("async_collectives", platform.device_of(x)):
        return 1
    return min(policy.num_chunks(rows.nbytes(features, x.dtype)), rows.sizes[0])


def reduce_beside(total: Tensor, rows: Matrices) -> Callable[[], Tensor]:
    """The own rows of the ranks' sum of ``total (outer, all rows, m)``, by one reduce-scatter; what is returned waits for it."""
    platform, cut = get_platform(), rows.flat_cut
    device = platform.device_of(total)
    if not platform.supports("async_collectives", device):
        reduced = rows.of_communicated(transport.reduce_scatter(rows.communicated(total), cut))
        return lambda: reduced
    if not cut.is_even:
        pending = transport.reduce_scatter(rows.communicated(total), cut, async_op=True)
        return lambda: rows.of_communicated(pending.wait())
    num_ranks, size, features = len(rows.sizes), rows.sizes[0], total.shape[-1]
    if rows.outer != 1:  # the collective wants the ranks in front
        total = platform.reshape(total, (rows.outer, num_ranks, size, features))
        total = platform.contiguous(platform.transpose(total, 0, 1))
    out = platform.empty((rows.outer * size, features), total.dtype, device)
    blocks = platform.reshape(total, (num_ranks * rows.outer * size, features))
    task = _scatter_into(out, blocks, rows)

    def wait() -> Tensor:
        task.wait()
        return platform.reshape(out, (rows.outer, size, features))

    return wait


def _scatter_into(out: Tensor, x: Tensor, rows: Matrices) -> Task:
    """Blocks of ``x``, one per rank along dim 0, reduced into ``out``; both contiguous."""
    group = rows.cut.group
    return run_beside(
        get_platform().device_of(x),
        lambda async_op: collectives.reduce_scatter(x, group, out=out, async_op=async_op),
        (x, out),
    )


def _in_chunks(
    xs: Sequence[Tensor], factors: Sequence[Tensor], rows: Matrices, num_chunks: int, summand: Tensor | None
) -> Callable[[], Tensor]:
    """Chunk c is the c-th part of every rank's rows, so it fills the c-th part of every rank's result."""
    platform = get_platform()
    num_ranks, size, features = len(rows.sizes), rows.sizes[0], factors[0].shape[1]
    kind = {"dtype": xs[0].dtype, "device": platform.device_of(xs[0])}
    # (outer, ranks, rows of a rank, k); the products lie with the ranks in front, as the collective wants them.
    xs = [platform.reshape(x, (rows.outer, num_ranks, size, x.shape[-1])) for x in xs]
    if summand is not None:
        summand = platform.reshape(summand, (rows.outer, num_ranks, size, features))
    result = platform.empty((rows.outer, size, features), **kind)
    tasks: list[tuple[Task, Tensor, Tensor]] = []
    for chunk in range(num_chunks):
        start, length = chunk_offset(size, num_chunks, chunk), chunk_size(size, num_chunks, chunk)
        if not length:
            continue
        products = platform.empty((num_ranks, rows.outer, length, features), **kind)
        if summand is not None:
            part = platform.narrow(summand, 2, start, length)
            platform.copy_(products, platform.transpose(part, 0, 1))
        for place, (x, factor) in enumerate(zip(xs, factors, strict=True)):
            is_first = place == 0 and summand is None
            _multiply(products, platform.narrow(x, 2, start, length), factor, is_first=is_first)
        target = platform.narrow(result, 1, start, length)
        # With one outer matrix the chunk's rows of the result are one block, which is filled where it is.
        out = target if rows.outer == 1 else platform.empty((rows.outer, length, features), **kind)
        flat = platform.reshape(out, (rows.outer * length, features))
        blocks = platform.reshape(products, (num_ranks * rows.outer * length, features))
        tasks.append((_scatter_into(flat, blocks, rows), target, out))

    def wait() -> Tensor:
        for task, target, out in tasks:
            task.wait()
            if rows.outer != 1:
                platform.copy_(target, out)
        return result

    return wait


def _multiply(products: Tensor, x: Tensor, factor: Tensor, *, is_first: bool) -> None:
    """``products (ranks, outer, n, m)`` become, or get added, ``x (outer, ranks, n, k) @ factor``."""
    platform = get_platform()
    num_ranks, outer, length, features = products.shape
    if outer == 1:  # one batch of products for all ranks
        whole = platform.reshape(products, (num_ranks, length, features))
        part = platform.reshape(x, tuple(x.shape[1:]))
        platform.matmul_into(whole, part, factor, None if is_first else whole)
        return
    for place in range(num_ranks):
        block = platform.reshape(platform.narrow(products, 0, place, 1), (outer, length, features))
        part = platform.reshape(platform.narrow(x, 1, place, 1), (outer, length, x.shape[-1]))
        platform.matmul_into(block, part, factor, None if is_first else block)
