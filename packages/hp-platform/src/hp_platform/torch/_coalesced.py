"""Collectives of torch.distributed for several tensors in one launch.

[Note: coalescing] torch's context manager for several collectives in one launch drops ``async_op`` of an all_gather (torch 2.11),
so that it always runs on NCCL's own stream, and takes the host's time in each call that it collects. The launches that it
ends in are methods of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from hp_platform.torch._wire import REDUCE_OPS, TorchWire
from hp_platform.torch._work import after


class TorchCoalescedOps(TorchWire):
    """Implements the coalesced launches of :class:`hp_platform.protocols.CommOps`. See [Note: coalescing]."""

    def all_reduce_coalesced_(self, xs: Sequence[torch.Tensor], op: str, group: Any, async_op: bool) -> Any:
        """Reduce each in place; one dtype."""
        xs, finish = self._reducible(xs, op)
        options = c10d.AllreduceCoalescedOptions()
        options.reduceOp, options.asyncOp = REDUCE_OPS[op], async_op
        return after(_ended(group.allreduce_coalesced(list(xs), options), async_op), finish)

    def all_gather_coalesced_into(
        self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], group: Any, async_op: bool
    ) -> Any:
        """Gather pairs."""
        options = c10d.AllgatherOptions()
        options.asyncOp = async_op
        gather = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
        movable = self._devices[xs[0].device.type].comm.movable
        if any(x.dtype not in movable for x in xs):
            outs, xs = [self._movable(out) for out in outs], [self._movable(x) for x in xs]
        return _ended(gather(list(outs), list(xs), options), async_op)

    def reduce_scatter_coalesced_into(
        self, outs: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], op: str, group: Any, async_op: bool
    ) -> Any:
        """Reduce pairs."""
        xs, _ = self._reducible(xs, op)
        outs, finish = self._reducible(outs, op)
        options = c10d.ReduceScatterOptions()
        options.reduceOp, options.asyncOp = REDUCE_OPS[op], async_op
        scatter = (
            getattr(group, "reduce_scatter_single_coalesced", None) or group.reduce_scatter_tensor_coalesced
        )
        return after(_ended(scatter(list(outs), list(xs), options), async_op), finish)

    def all_to_all_coalesced_into(
        self,
        outs: Sequence[Sequence[torch.Tensor]],
        xs: Sequence[Sequence[torch.Tensor]],
        group: Any,
        async_op: bool,
    ) -> Any:
        """Exchange lists."""
        device = xs[0][0].device
        options = c10d.AllToAllOptions()
        options.asyncOp = async_op
        group._start_coalescing(device)
        try:
            for out, x in zip(outs, xs, strict=True):
                group.alltoall([self._movable(y) for y in out], [self._movable(y) for y in x], options)
        finally:  # or the group would go on collecting
            work = group._end_coalescing(device)
        return _ended(work, async_op)


def _ended(work: Any, async_op: bool) -> Any:
    """The handle of a launch; None, after it, where it was not asked for. A backend that knew so gave none."""
    if async_op:
        return work
    if work is not None:
        work.wait()
    return None
