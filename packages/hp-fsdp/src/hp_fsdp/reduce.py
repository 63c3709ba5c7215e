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
from hp_fsdp.places import Places
from hp_fsdp.shard_gradients import ShardGradients
from hp_fsdp.streams import Streams, Task
from hp_platform import collectives
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor

ReduceOp = Literal["mean", "sum"]


@dataclass(frozen=True)
class Wishes:
    """How gradients are reduced; set by the user, for a unit."""

    op: ReduceOp = "mean"
    factor: Any = None
    """Every gradient is multiplied by it once: a number, a tensor with one element, or None."""
    is_fused: bool = True
    all_reduce: bool = True
    """Whether replicas are reduced now, or in a later backward."""


class Reduction:
    """One reduction, from its launch until the gradients of the shards are there."""

    def __init__(
        self, streams: Streams, places: Places, lines: Lines, wishes: Wishes, target: ShardGradients
    ) -> None:
        self.platform: Platform = streams.platform
        self.streams = streams
        self.places = places
        self.lines = lines
        self.wishes = wishes
        self.target = target
        self._task: Task | None = None
        self._kept: Any = None
        self._undecided: Callable[[], None] | None = None

    def launch(self) -> None:
        """Take the gradients and send them.

        Communication: one reduce-scatter of the lines over the shard group (without fusion one per parameter); then, on a
        2-D mesh and unless it was put off, one all-reduce of a line over the replicate group.
        """
        lines, streams = self.lines, self.streams
        gradients = [param.take_gradient() for param in lines.params]
        absent = [x is None for x in gradients]
        row, blocks = self._packed(gradients)
        # Kept until the reduction is over: see [Note: memory and streams].
        self._kept = (row, blocks)

        def start() -> Callable[[], None]:
            works = self._scatter(row, blocks)

            def follow() -> None:
                for work in works:
                    work.wait()
                self._settle(row, absent)

            return follow

        self._task = streams.run(streams.reduce, start)

    def finish(self) -> None:
        """Gradients of the shards are there for what the computation does next, and the buffers may be used again."""
        if self._task is not None:
            self._task.wait()
            self._task = self._kept = None
        if self._undecided is not None:
            undecided, self._undecided = self._undecided, None
            undecided()

    def _packed(self, gradients: Gradients) -> tuple[Tensor, list[Tensor]]:
        """Where this rank's line of the result goes, and what is sent."""
        platform, lines, places = self.platform, self.lines, self.places
        alone = places.num_shards == 1
        kind = places.device.partition(":")[0]
        if not alone and (not self.wishes.is_fused or platform.can_coalesce(kind)):
            row = platform.empty((lines.numel,), lines.dtype, places.device)
            return row, lines.blocks(gradients)
        matrix = platform.reshape(lines.rows(gradients), (-1,))
        if alone:
            return matrix, []
        return platform.empty((lines.numel,), lines.dtype, places.device), [matrix]

    def _scatter(self, row: Tensor, blocks: list[Tensor]) -> list[Any]:
        platform, group, op = self.platform, self.places.shard_group, self.wishes.op
        async_op = self.streams.async_op
        if not blocks:
            return []
        if len(blocks) == 1:
            out = row if blocks[0].ndim == 1 else platform.reshape(row, (1, -1))
            work: Any = collectives.reduce_scatter(blocks[0], group, op, out=out, async_op=async_op)
            return [work] if async_op else []
        pieces = platform.split(platform.reshape(row, (1, -1)), self.lines.sizes, 1)
        if self.wishes.is_fused:
            work = collectives.reduce_scatter_coalesced(blocks, group, op, outs=pieces, async_op=async_op)
            return [work] if async_op else []
        works = [
            collectives.reduce_scatter(block, group, op, out=piece, async_op=async_op)
            for block, piece in zip(blocks, pieces, strict=True)
        ]
        return works if async_op else []

    def _settle(self, row: Tensor, absent: list[bool]) -> None:
        """Behind the reduce-scatter, in its stream."""
        platform, replicas, wishes = self.platform, self.places.replicate_group, self.wishes
        row = self.target.with_kept(self.lines, row)
        if replicas is not None and not wishes.all_reduce:
            self.target.keep(self.lines, row)
            return
        if replicas is not None:
            row = collectives.all_reduce(row, replicas, wishes.op, out=row)
        lines = self.lines
        *parts, used = platform.split(row, [*lines.sizes[:-1], *[1] * len(lines.scalars), len(lines.params)])
        if wishes.factor is not None:
            for part in parts:
                platform.mul_(part, wishes.factor)
        if not any(absent):
            self.target.add(self.lines.params, parts)
            return

        def decide() -> None:
            unused = platform.to_numpy(used) == 0
            kept = [(p, x) for p, x, skip in zip(self.lines.params, parts, unused, strict=True) if not skip]
            self.target.add([p for p, _ in kept], [x for _, x in kept])

        # Reading numbers makes the host wait for the device: not before it must.
        if self.streams.are_real:
            self._undecided = decide
        else:
            decide()
