"""From gradients of whole parameters to mean gradients of shards: one reduce-scatter per dtype, and what follows it.

[Note: unused parameters] A rank without a gradient sends zeros, as every rank takes part in every reduction whatever branch
it took. A parameter that no rank has used gets no gradient (None stays None), as in one process. The numbers that tell so
are read only where this rank has no gradient itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from hp_fsdp.lines import Gradients, Lines
from hp_fsdp.narrow_exchange import NarrowExchange
from hp_fsdp.offload import Landing
from hp_fsdp.peer_exchange import PeerExchange
from hp_fsdp.peers import Peers
from hp_fsdp.places import Places
from hp_fsdp.shard_gradients import ShardGradients
from hp_fsdp.streams import Streams, Task
from hp_platform import collectives
from hp_platform.collectives.unchecked import can_exchange_each, reduce_scatter_into_each
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor

ReduceOp = Literal["mean", "sum"]


@dataclass(frozen=True)
class Wishes:
    """How gradients are reduced; set by the user, for a unit."""

    op: ReduceOp = "mean"
    factor: Any = None
    """Every gradient is multiplied by it once: a number, a tensor with one element, or None."""
    all_reduce: bool = True
    """Whether replicas are reduced now, or in a later backward."""


class Reduction:
    """One reduction, from its launch until the gradients of the shards are there."""

    def __init__(
        self,
        streams: Streams,
        places: Places,
        lines: Lines,
        wishes: Wishes,
        target: ShardGradients,
        *,
        is_fused: bool,
        is_of_one_backward: bool,
        peers: Peers | None = None,
    ) -> None:
        """``is_of_one_backward``: no gradients of earlier ones wait to be reduced. The same on all ranks. ``peers``: who reaches
        each other's memory; None: nobody, or that is not wanted.
        """
        self.platform: Platform = streams.platform
        self.streams = streams
        self.places = places
        self.lines = lines
        self.wishes = wishes
        self.target = target
        self.is_fused = is_fused
        narrow = lines.narrow_dtype if is_of_one_backward else None
        self._dtype = lines.dtype if narrow is None else narrow
        """In which gradients travel."""
        self._peers = peers
        self._exchange: NarrowExchange | PeerExchange | None = None
        self._task: Task | None = None
        self._kept: Any = None
        self._undecided: Callable[[], None] | None = None
        self._landing: Landing | None = None
        self._is_dropped = False

    def launch(self) -> None:
        """Take the gradients and send them.

        Communication: one reduce-scatter of the lines over the shard group (without fusion one per parameter, and one of
        tails), or an all-to-all instead of it ([Note: narrow on the wire]); one all-reduce there of replicated parameters that
        are no scalars, if there are any; then, on a 2-D mesh and unless it was put off, one all-reduce of the result over the
        replicate group.
        """
        lines, streams, wishes = self.lines, self.streams, self.wishes
        gradients = lines.take_gradients()
        absent = [x is None for x in gradients]
        try:
            blocks, replicated = self._packed(gradients), lines.replicated_line(gradients)
        except RuntimeError:
            lines.refuse_sparse(gradients)
            raise
        exchange = self._by_peers()
        row: Tensor | None
        targets: list[Tensor]
        if exchange is not None and replicated is None:
            row, targets = self.platform.empty((lines.numel,), lines.dtype, self.places.device), []
        else:
            row, targets = self._received(blocks, replicated)
        if exchange is None and self._dtype != lines.dtype:
            exchange = NarrowExchange(self.platform, self.places, blocks, is_fused=self.is_fused)
        self._exchange = exchange
        # Kept until the reduction is over: see [Note: memory and streams].
        self._kept = (row, targets, blocks, replicated)

        def start() -> Callable[[], None]:
            works = self._send(blocks, replicated, targets, row)

            def follow() -> None:
                for work in works:
                    work.wait()
                if self._is_dropped:
                    return
                if isinstance(self._exchange, NarrowExchange):
                    self._exchange.add_up(row, targets[: len(blocks)], wishes.op)
                self._settle(self._joined(targets) if row is None else row, absent)

            return follow

        has_more = self.target.host is not None or (
            self.places.replicate_group is not None and wishes.all_reduce
        )
        self._task = streams.run(streams.reduce, start, streams.after_reduce if has_more else None)

    def finish(self) -> None:
        """Gradients of the shards are there for what the computation does next, and the buffers may be used again."""
        if self._task is not None:
            self._task.wait()
            self._task = self._kept = self._exchange = None
        if self._undecided is not None:
            undecided, self._undecided = self._undecided, None
            undecided()

    def drop(self) -> None:
        """What is not among the gradients of the shards yet is not wanted any more; :meth:`finish` only waits."""
        self._is_dropped = True
        self._undecided = self._landing = None

    def deliver(self) -> None:
        """Of offloaded shards: their gradients are there. The host waits for the copy."""
        if self._landing is not None:
            parts, used = self.lines.parts(self._landing.wait())
            self._landing = None
            self._give(parts, used)

    def _packed(self, gradients: Gradients) -> list[Tensor]:
        """What is scattered, rank by rank: 1-D each."""
        platform, kind = self.platform, self.streams.device.name
        takes_several = not self.is_fused or platform.can_coalesce(kind)
        if takes_several and self.is_fused and self._peers is None and self._dtype != self.lines.dtype:
            takes_several = can_exchange_each(kind)
        if self.places.num_shards > 1 and takes_several:
            return self.lines.blocks(gradients, self._dtype)
        return [self.platform.reshape(self.lines.rows(gradients, self._dtype), (-1,))]

    def _received(
        self, blocks: list[Tensor], replicated: Tensor | None
    ) -> tuple[Tensor | None, list[Tensor]]:
        """The result as one tensor, and the places in it for what comes of each block, and of ``replicated``.

        Without the former the places are tensors of their own, where parts of a tensor cannot be written. A group of one rank
        has nothing to receive.
        """
        platform, lines, device = self.platform, self.lines, self.places.device
        behind = [] if replicated is None else [replicated]
        if self.places.num_shards == 1:
            return self._joined([*blocks, *behind]), []
        num_shards = self.places.num_shards
        sizes = [block.shape[0] // num_shards for block in blocks] + [line.shape[0] for line in behind]
        if len(sizes) > 1 and not platform.supports("write_into_view", device):
            return None, [platform.empty((size,), lines.dtype, device) for size in sizes]
        row = platform.empty((sum(sizes),), lines.dtype, device)
        return row, platform.split(row, sizes)

    def _joined(self, targets: list[Tensor]) -> Tensor:
        return targets[0] if len(targets) == 1 else self.platform.cat(targets)

    def _by_peers(self) -> NarrowExchange | PeerExchange | None:
        """What is done instead of a reduce-scatter, if the ranks reach each other's memory."""
        if self._peers is None:
            return None
        kind = "all_to_all" if self._dtype != self.lines.dtype else "reduce_scatter"
        return self._peers.exchange(self.lines.sizes, self._dtype, kind)

    def _send(
        self, blocks: list[Tensor], replicated: Tensor | None, targets: list[Tensor], row: Tensor | None
    ) -> list[Any]:
        """Handles to wait for, where launches do not run in the order of a stream."""
        group, op, async_op = self.places.shard_group, self.wishes.op, self.streams.async_op
        if self.places.num_shards == 1:
            return []
        outs = targets[: len(blocks)]
        if isinstance(self._exchange, PeerExchange):
            assert row is not None
            self._exchange.run(blocks, row, op)
            works = []
        elif self._exchange is not None:
            works = self._exchange.start(async_op=async_op)
        elif len(blocks) > 1 and self.is_fused:
            if self._is_native():
                nbytes = self.lines.nbytes(self._dtype)
                work: Any = reduce_scatter_into_each(outs, blocks, op, group, nbytes, async_op)
            else:
                work = collectives.reduce_scatter_coalesced(blocks, group, op, outs=outs, async_op=async_op)
            works = [work]
        else:
            works = [
                collectives.reduce_scatter(block, group, op, out=out, async_op=async_op)
                for block, out in zip(blocks, outs, strict=True)
            ]
        if replicated is not None:
            works.append(collectives.all_reduce(replicated, group, op, out=targets[-1], async_op=async_op))
        return works if async_op else []

    def _is_native(self) -> bool:
        """Whether the backend reduces as it is wished."""
        platform, kind = self.platform, self.streams.device.name
        return self.wishes.op in platform.native_reduce_ops(kind) and platform.can_reduce(
            self.lines.dtype, kind
        )

    def _settle(self, row: Tensor, absent: list[bool]) -> None:
        """Behind the reduce-scatter."""
        platform, replicas, wishes = self.platform, self.places.replicate_group, self.wishes
        row = self.target.with_kept(self.lines, row)
        self._kept = (self._kept, row)  # also the sum that was kept before, which nobody else holds now
        if replicas is not None and not wishes.all_reduce:
            self.target.keep(self.lines, row)
            return
        if replicas is not None:
            row = collectives.all_reduce(row, replicas, wishes.op, out=row)
        parts, used = self.lines.parts(row)
        if wishes.factor is not None:
            for part in parts:
                platform.mul_(part, wishes.factor)
        if self.target.host is not None:
            self._landing = self.target.host.land(row)
            return
        parts = self._in_dtype_of_shards(row, parts)
        if not any(absent):
            self.target.add(self.lines.params, parts)
        elif self.streams.are_real:  # Reading numbers makes the host wait for the device: not before it must.
            self._undecided = lambda: self._give(parts, used)
        else:
            self._give(parts, used)

    def _in_dtype_of_shards(self, row: Tensor, parts: list[Tensor]) -> list[Tensor]:
        """``parts`` of ``row``, or the same of a cast of it: one for all, so that gradients of a row lie in a row."""
        dtype = self.lines.dtype_of_shards
        if self.target.in_main_grad or dtype is None or dtype == row.dtype:
            return parts
        return self.lines.parts(self.platform.cast(row, dtype))[0]

    def _give(self, parts: list[Tensor], used: Tensor) -> None:
        """Gradients to the parameters that some rank has used."""
        unused = self.platform.to_numpy(used) == 0
        kept = [(p, x) for p, x, skip in zip(self.lines.params, parts, unused, strict=True) if not skip]
        self.target.add([p for p, _ in kept], [x for _, x in kept])
