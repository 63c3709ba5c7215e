"""Collectives of torch.distributed: contiguous tensors in, given buffers filled.

[Note: exchange] gloo's reduce_scatter is an all_reduce of everything (on four ranks of one host twice the time of an
all_to_all), and its work handle never says that it is completed, not even after waiting. Sending every block to its owner,
who reduces the ranks' contributions in their order, is faster, and sums of 16-bit floats are rounded once, not at every step.

[Note: padding] gloo and HCCL gather and reduce lists of equal sizes only. Uneven ones are padded to the longest: shards by
ceil-sized chunks differ in the last ranks only, so little more is sent, and it stays one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hp_platform.protocols.comm import P2P
from hp_platform.torch._dtypes import resolve
from hp_platform.torch._peer_memory import SymmetricMemory
from hp_platform.torch._wire import REDUCE_OPS, TorchWire, plain
from hp_platform.torch._work import All, after

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


class TorchCommOps(TorchWire):
    """Implements the launches of :class:`hp_platform.protocols.CommOps`, but for several tensors in one."""

    def all_reduce_(self, x: torch.Tensor, op: str, group: Any, async_op: bool) -> Any:
        """Reduce in place."""
        (x,), finish = self._reducible([x], op)
        return after(dist.all_reduce(x, REDUCE_OPS[op], group, async_op), finish)

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
        out, x = plain(out), plain(x)
        if self._devices[out.device.type].comm.scatters_by_exchange:
            return self._exchange_and_reduce(out, x, [out.shape[0]] * group.size(), op, group, async_op)
        (x,), _ = self._reducible([x], op)
        (out,), finish = self._reducible([out], op)
        return after(_reduce_scatter_into(out, x, REDUCE_OPS[op], group, async_op), finish)

    def reduce_scatter_uneven_into(
        self, out: torch.Tensor, xs: Sequence[torch.Tensor], op: str, group: Any, async_op: bool
    ) -> Any:
        """Reduce blocks of any size."""
        out, xs = plain(out), [plain(x) for x in xs]
        facts = self._devices[out.device.type].comm
        if facts.scatters_by_exchange:
            return self._exchange_and_reduce(
                out, torch.cat(xs), [x.shape[0] for x in xs], op, group, async_op
            )
        if facts.uneven_lists:
            xs, _ = self._reducible(xs, op)
            (out,), finish = self._reducible([out], op)
            return after(dist.reduce_scatter(out, xs, REDUCE_OPS[op], group, async_op), finish)
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
            _copy(outs[group.rank()], plain(x))
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

    def peer_domain(self, device: str) -> str | None:
        """The machine, if its devices are connected."""
        return self._devices[device.partition(":")[0]].peer_domain()

    def peer_memory(
        self, numel: int, dtype: Any, device: str, group: Any, timeout: timedelta
    ) -> SymmetricMemory:
        """By torch's symmetric memory."""
        owner = self._devices[device.partition(":")[0]]
        return SymmetricMemory(numel, resolve(dtype), device, group, timeout, owner)


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    if x.shape[0] == length:
        return x
    padded = x.new_zeros((length, *x.shape[1:]))
    padded[: x.shape[0]].copy_(x)
    return padded


def _copy(out: torch.Tensor, value: torch.Tensor) -> None:
    out.copy_(value)
