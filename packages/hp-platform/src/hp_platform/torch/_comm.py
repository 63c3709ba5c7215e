"""Collectives of torch.distributed: contiguous tensors in, given buffers filled.

[Note: bytes] Backends move fewer dtypes than torch has. Where only data moves, a tensor of another dtype travels as its bytes, a
view with one more dim at the end, so that dim 0 stays what it is.

[Note: exchange] gloo's reduce_scatter is an all_reduce of everything (on four ranks of one host twice the time of an
all_to_all), and its work handle never says that it is completed, not even after waiting. Sending every block to its owner,
who reduces the ranks' contributions in their order, is faster, and sums of 16-bit floats are rounded once, not at every step.

[Note: padding] gloo and HCCL gather and reduce lists of equal sizes only. Uneven ones are padded to the longest: shards by
ceil-sized chunks differ in the last ranks only, so little more is sent, and it stays one launch.

[Note: coalescing] torch's context manager for several collectives in one launch drops ``async_op`` of an all_gather (torch 2.11),
so that it always runs on NCCL's own stream, and takes the host's time in each call that it collects. The launches that it
ends in are methods of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from hp_platform.protocols.comm import P2P
from hp_platform.torch._dtypes import resolve
from hp_platform.torch._ordered import of_ordered, ordered
from hp_platform.torch._peer_memory import SymmetricMemory
from hp_platform.torch._work import All, after
from hp_platform.torch.device import TorchDevice

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
_LOCAL: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sum": lambda xs, out: torch.sum(xs, 0, dtype=out.dtype, out=out),
    "max": lambda xs, out: torch.amax(xs, 0, out=out),
    "min": lambda xs, out: torch.amin(xs, 0, out=out),
    "prod": lambda xs, out: torch.prod(xs, 0, dtype=out.dtype, out=out),
}
"""Reduction of contributions (ranks, ...) into ``out``."""
# torch 2.13 renamed these two, and warns of the old names.
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchCommOps:
    """Implements the launches of :class:`hp_platform.protocols.CommOps`."""

    _devices: dict[str, TorchDevice]

    # --- collectives
    def all_reduce_(self, x: torch.Tensor, op: str, group: Any, async_op: bool) -> Any:
        """Reduce in place."""
        (x,), finish = self._reducible([x], op)
        return after(dist.all_reduce(x, _OPS[op], group, async_op), finish)

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, group: Any, async_op: bool) -> Any:
        """Gather blocks of equal size."""
        x = self._movable(x if x.dim() else x.view(1))
        return _all_gather_into(self._movable(out), x, group, async_op)

    def all_gather_uneven_into(
        self, outs: Sequence[torch.Tensor], x: torch.Tensor, group: Any, async_op: bool
    ) -> Any:
        """Gather blocks of any size."""
        x, outs = self._movable(x), [self._movable(out) for out in outs]
        if self._devices[x.device.type].comm.uneven_lists:
            return dist.all_gather(outs, x, group, async_op)
        longest = max(out.shape[0] for out in outs)  # See [Note: padding].
        gathered = x.new_empty((len(outs), longest, *x.shape[1:]))

        def finish() -> None:
            torch._foreach_copy_(outs, [row[: out.shape[0]] for row, out in zip(gathered, outs, strict=True)])

        work = _all_gather_into(gathered.flatten(0, 1), _padded(x, longest), group, async_op)
        return after(work, finish)

    def reduce_scatter_into(
        self, out: torch.Tensor, x: torch.Tensor, op: str, group: Any, async_op: bool
    ) -> Any:
        """Reduce blocks of equal size."""
        out, x = _plain(out), _plain(x)
        if self._devices[out.device.type].comm.scatters_by_exchange:
            return self._exchange_and_reduce(out, x, [out.shape[0]] * group.size(), op, group, async_op)
        (x,), _ = self._reducible([x], op)
        (out,), finish = self._reducible([out], op)
        return after(_reduce_scatter_into(out, x, _OPS[op], group, async_op), finish)

    def reduce_scatter_uneven_into(
        self, out: torch.Tensor, xs: Sequence[torch.Tensor], op: str, group: Any, async_op: bool
    ) -> Any:
        """Reduce blocks of any size."""
        out, xs = _plain(out), [_plain(x) for x in xs]
        facts = self._devices[out.device.type].comm
        if facts.scatters_by_exchange:
            return self._exchange_and_reduce(
                out, torch.cat(xs), [x.shape[0] for x in xs], op, group, async_op
            )
        if facts.uneven_lists:
            xs, _ = self._reducible(xs, op)
            (out,), finish = self._reducible([out], op)
            return after(dist.reduce_scatter(out, xs, _OPS[op], group, async_op), finish)
        longest = max(x.shape[0] for x in xs)  # See [Note: padding].
        mine = out.new_empty((longest, *out.shape[1:]))
        blocks = torch.cat([_padded(x, longest) for x in xs])
        work = self.reduce_scatter_into(mine, blocks, op, group, async_op)
        return after(work, lambda: _copy(out, mine[: out.shape[0]]))

    def _exchange_and_reduce(
        self, out: torch.Tensor, x: torch.Tensor, sizes: list[int], op: str, group: Any, async_op: bool
    ) -> Any:
        """See [Note: exchange]. ``x`` is the blocks one after the other, block r for rank r."""
        num_ranks = group.size()
        received = out.new_empty((num_ranks * out.shape[0], *out.shape[1:]))
        work = self.all_to_all_into(received, x, [out.shape[0]] * num_ranks, sizes, group, async_op)
        contributions = received.view(num_ranks, *out.shape)
        return after(work, lambda: _LOCAL[op](contributions, out))

    def all_to_all_into(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        out_sizes: Sequence[int],
        in_sizes: Sequence[int],
        group: Any,
        async_op: bool,
    ) -> Any:
        """Exchange blocks of any size."""
        return dist.all_to_all_single(
            self._movable(out), self._movable(x), list(out_sizes), list(in_sizes), group, async_op
        )

    def broadcast_(self, x: torch.Tensor, src: int, group: Any, async_op: bool) -> Any:
        """One rank's tensor to all."""
        return dist.broadcast(self._movable(x), src, group, async_op)

    def scatter_into(
        self, out: torch.Tensor, xs: Sequence[torch.Tensor] | None, src: int, group: Any, async_op: bool
    ) -> Any:
        """One rank's list to all."""
        blocks = None if xs is None else [self._movable(x) for x in xs]
        return dist.scatter(self._movable(out), blocks, src, group, async_op)

    def gather_into(
        self, outs: Sequence[torch.Tensor] | None, x: torch.Tensor, dst: int, group: Any, async_op: bool
    ) -> Any:
        """All ranks' tensors to one."""
        if not self._devices[x.device.type].comm.gathers:
            return self._gather_by_sends(outs, x, dst, group, async_op)
        blocks = None if outs is None else [self._movable(out) for out in outs]
        return dist.gather(self._movable(x), blocks, dst, group, async_op)

    def _gather_by_sends(
        self, outs: Sequence[torch.Tensor] | None, x: torch.Tensor, dst: int, group: Any, async_op: bool
    ) -> Any:
        ops: list[P2P] = [("send", x, dst)]
        if outs is not None:
            ranks = dist.get_process_group_ranks(group)
            _copy(outs[group.rank()], _plain(x))
            ops = [("recv", out, rank) for out, rank in zip(outs, ranks, strict=True) if rank != dst]
        work = All(self.batch_p2p(ops, group))
        if async_op:
            return work
        work.wait()
        return None

    def send(self, x: torch.Tensor, dst: int, group: Any, async_op: bool) -> Any:
        """To one rank."""
        x = self._movable(x)
        if async_op:
            return dist.isend(x, dst, group)
        return dist.send(x, dst, group)

    def recv_(self, x: torch.Tensor, src: int, group: Any, async_op: bool) -> Any:
        """From one rank."""
        x = self._movable(x)
        if async_op:
            return dist.irecv(x, src, group)
        dist.recv(x, src, group)  # which returns the sender
        return None

    def batch_p2p(self, ops: Sequence[P2P], group: Any) -> Sequence[Any]:
        """Start sends and receives together."""
        if not ops:
            return []
        start = {"send": dist.isend, "recv": dist.irecv}
        return dist.batch_isend_irecv(
            [dist.P2POp(start[kind], self._movable(x), peer, group) for kind, x, peer in ops]
        )

    def barrier(self, group: Any, async_op: bool) -> Any:
        """Wait for all ranks."""
        kinds = [device.type for device in group._device_types]
        if "cpu" in kinds:
            return dist.barrier(group, async_op)
        # The backend of an accelerator reduces a tensor of its own making; unless told, it guesses on which device, and warns.
        index = torch.device(self._devices[kinds[0]].current()).index
        return dist.barrier(group, async_op, device_ids=[index])

    # --- coalesced. See [Note: coalescing].
    def all_reduce_coalesced_(self, xs: Sequence[torch.Tensor], op: str, group: Any, async_op: bool) -> Any:
        """Reduce each in place; one dtype."""
        xs, finish = self._reducible(xs, op)
        options = c10d.AllreduceCoalescedOptions()
        options.reduceOp, options.asyncOp = _OPS[op], async_op
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
        options.reduceOp, options.asyncOp = _OPS[op], async_op
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

    def peer_domain(self, device: str) -> str | None:
        """The machine, if its devices are connected."""
        return self._devices[device.partition(":")[0]].peer_domain()

    def peer_memory(
        self, numel: int, dtype: Any, device: str, group: Any, timeout: timedelta
    ) -> SymmetricMemory:
        """By torch's symmetric memory."""
        owner = self._devices[device.partition(":")[0]]
        return SymmetricMemory(numel, resolve(dtype), device, group, timeout, owner)

    def _reducible(
        self, xs: Sequence[torch.Tensor], op: str
    ) -> tuple[Sequence[torch.Tensor], Callable[[], None] | None]:
        """The tensors (of one dtype) in a form that the backend reduces, and what copies them back (None if they are the same).

        See [Note: NaN on the way] in hp_platform.torch._ordered.
        """
        xs = [_plain(x) for x in xs]
        facts, dtype = self._devices[xs[0].device.type].comm, xs[0].dtype
        is_ordered = facts.loses_nan and op in ("max", "min") and dtype.is_floating_point
        if not is_ordered and dtype not in facts.widened:
            return xs, None
        sent = [ordered(x, op) for x in xs] if is_ordered else xs
        wide = facts.widened.get(sent[0].dtype, sent[0].dtype)
        sent = [x.to(wide) for x in sent]

        def finish() -> None:
            for x, y in zip(xs, sent, strict=True):
                _copy(x, of_ordered(y, dtype) if is_ordered else y)

        return sent, finish

    def _movable(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` in a dtype that its backend moves. See [Note: bytes]."""
        x = _plain(x)
        if x.dtype in self._devices[x.device.type].comm.movable:
            return x
        return x.unsqueeze(-1).view(torch.uint8)


def _ended(work: Any, async_op: bool) -> Any:
    """The handle of a launch; None, after it, where it was not asked for. A backend that knew so gave none."""
    if async_op:
        return work
    if work is not None:
        work.wait()
    return None


def _plain(x: torch.Tensor) -> torch.Tensor:
    """``x`` outside of the graph: a launch writes into tensors, and records nothing."""
    return x.detach() if x.requires_grad else x


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    if x.shape[0] == length:
        return x
    padded = x.new_zeros((length, *x.shape[1:]))
    padded[: x.shape[0]].copy_(x)
    return padded


def _copy(out: torch.Tensor, value: torch.Tensor) -> None:
    out.copy_(value)
