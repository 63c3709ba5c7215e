"""Collectives of MindSpore on CPU, composed of all_gather and all_reduce.

[Note: what is composed of what] MindSpore's CPU build also has kernels for broadcast and scatter. They let the source run ahead
of the others, so that ranks in different collectives cannot be noticed afterwards (see [Note: being in step] in
:mod:`hp_platform.mindspore._world`); and they know fewer dtypes than a sum of bits. No kernel takes empty tensors; all
ranks know that they are empty, and all skip the launch. Outputs are whole tensors, see :func:`_wire.is_whole`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import mindspore
import numpy as np
from mindspore import communication, mint, ops
from mindspore.mint import distributed

from hp_platform.mindspore._dtypes import NAME_OF, resolve
from hp_platform.mindspore._ordered import FLOATS, of_ordered, ordered
from hp_platform.mindspore._p2p import MindSporeP2POps
from hp_platform.mindspore._private import executor, own_copy
from hp_platform.mindspore._recording import no_grad
from hp_platform.mindspore._wire import (
    NO_LAUNCH,
    Launch,
    Work,
    carried,
    fill,
    integers,
    is_whole,
    padded,
    started,
)

if TYPE_CHECKING:
    from hp_platform.protocols.peer import PeerMemory

REDUCED_BY_KERNEL = frozenset({"float32", "float16", "bfloat16", "int64", "int32", "int8"})
REDUCED_IN_ORDER = frozenset({"float64", "uint8", "int16"})
"""Gathered, and then reduced by each rank in the order of ranks."""

_PAIRWISE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": mint.add,
    "prod": mint.mul,
    "max": mint.maximum,
    "min": mint.minimum,
}


class MindSporeCommOps(MindSporeP2POps):
    """Collectives of :class:`hp_platform.protocols.CommOps` on CPU."""

    _drain = staticmethod(executor.sync)

    # --- what can be done
    def native_reduce_ops(self, device_type: str) -> frozenset[str]:
        """MindSpore's avg truncates integers, so the mean is left to the sum."""
        return frozenset(_PAIRWISE)

    def can_reduce(self, dtype: Any, device_type: str) -> bool:
        """Whether there is a kernel or an ordered reduction."""
        return NAME_OF[resolve(dtype)] in REDUCED_BY_KERNEL | REDUCED_IN_ORDER

    def can_coalesce(self, device_type: str) -> bool:
        """No launch takes several tensors."""
        return False

    def can_exchange_lists(self, device_type: str) -> bool:
        """Nor several lists."""
        return False

    # --- collectives
    def all_reduce_(self, x: Any, op: str, group: str, async_op: bool) -> Work | None:
        """``x`` becomes the reduction."""
        with no_grad():
            total, launch = self._reduced(x.view((x.size,)), op, group, async_op, may_overwrite=is_whole(x))
            return self._started(launch, lambda: fill(x, total()), async_op)

    def all_gather_into(self, out: Any, x: Any, group: str, async_op: bool) -> Work | None:
        """``out`` becomes the ranks' tensors."""
        with no_grad():
            pieces, launch = self._gathered(carried(x), group, async_op)
            return self._started(launch, lambda: fill(out, mint.cat(pieces)), async_op)

    def all_gather_uneven_into(self, outs: Sequence[Any], x: Any, group: str, async_op: bool) -> Work | None:
        """Each of ``outs`` becomes its rank's tensor: all travel as long as the longest."""
        with no_grad():
            rows = [carried(out) for out in outs]
            pieces, launch = self._gathered(
                padded(carried(x), max(row.size for row in rows)), group, async_op
            )

            def finish() -> None:
                for out, row, piece in zip(outs, rows, pieces, strict=True):
                    fill(out, mint.narrow(piece, 0, 0, row.size))

            return self._started(launch, finish, async_op)

    def reduce_scatter_into(self, out: Any, x: Any, op: str, group: str, async_op: bool) -> Work | None:
        """``out`` becomes this rank's block."""
        mine = self.native_rank(group)  # type: ignore[attr-defined]
        return self._reduce_scatter(out, x.view((x.size,)), mine * out.size, op, group, async_op)

    def reduce_scatter_uneven_into(
        self, out: Any, xs: Sequence[Any], op: str, group: str, async_op: bool
    ) -> Work | None:
        """``out`` becomes this rank's block."""
        mine = self.native_rank(group)  # type: ignore[attr-defined]
        row = mint.cat([x.view((x.size,)) for x in xs])
        return self._reduce_scatter(out, row, sum(x.size for x in xs[:mine]), op, group, async_op)

    def all_to_all_into(
        self,
        out: Any,
        x: Any,
        out_sizes: Sequence[int],
        in_sizes: Sequence[int],
        group: str,
        async_op: bool,
    ) -> Work | None:
        """Blocks of dim 0 change places. The sizes of all ranks are exchanged first, which the host waits for."""
        mine = self.native_rank(group)  # type: ignore[attr-defined]
        with no_grad():
            told = mindspore.Tensor(np.array([*in_sizes, *out_sizes], np.int64))
            replies, exchange = self._gathered(told, group, False)
            table = np.stack([reply.asnumpy() for reply in replies])
            exchange.check()
            sent, expected = table[:, : len(in_sizes)], table[:, len(in_sizes) :]
            # All ranks see the same table, so all of them raise, and stay in step.
            if (sent != expected.T).any():
                giver, taker = (int(i) for i in np.argwhere(sent != expected.T)[0])
                raise ValueError(
                    f"all_to_all sizes do not agree: rank {giver} of the group sends {sent[giver, taker]} rows to rank {taker}, "
                    f"which expects {expected[taker, giver]}"
                )
            width = int(np.prod(x.shape[1:]))
            pieces, launch = self._gathered(
                padded(carried(x), _carried_size(x, int(sent.sum(axis=1).max()) * width)), group, async_op
            )

            def finish() -> None:
                starts = sent[:, :mine].sum(axis=1)
                blocks = [
                    mint.narrow(
                        piece, 0, _carried_size(x, int(start) * width), _carried_size(x, int(size) * width)
                    )
                    for piece, start, size in zip(pieces, starts, sent[:, mine], strict=True)
                ]
                fill(out, mint.cat(blocks))

            return self._started(launch, finish, async_op)

    def broadcast_(self, x: Any, src: int, group: str, async_op: bool) -> Work | None:
        """``x`` becomes that of ``src``: a sum of bits to which the others add nothing."""
        with no_grad():
            row = integers(x)
            total, launch = self._from_one(row if self._is_me(src) else None, row, group, async_op)
            return self._started(launch, lambda: fill(x, total()), async_op)

    def scatter_into(
        self, out: Any, xs: Sequence[Any] | None, src: int, group: str, async_op: bool
    ) -> Work | None:
        """``out`` becomes this rank's of ``src``'s tensors."""
        mine, size = self.native_rank(group), len(self.native_ranks(group))  # type: ignore[attr-defined]
        with no_grad():
            row = integers(out)
            whole = None if xs is None or not self._is_me(src) else mint.cat([integers(x) for x in xs])
            like = mint.empty((size * row.size,), dtype=row.dtype)
            total, launch = self._from_one(whole, like, group, async_op)
            return self._started(
                launch, lambda: fill(out, mint.narrow(total(), 0, mine * row.size, row.size)), async_op
            )

    def gather_into(
        self, outs: Sequence[Any] | None, x: Any, dst: int, group: str, async_op: bool
    ) -> Work | None:
        """``outs`` become the ranks' tensors on ``dst``."""
        with no_grad():
            pieces, launch = self._gathered(carried(x), group, async_op)

            def finish() -> None:
                if outs is not None and self._is_me(dst):
                    for out, piece in zip(outs, pieces, strict=True):
                        fill(out, piece)

            return self._started(launch, finish, async_op)

    def barrier(self, group: str, async_op: bool) -> Work | None:
        """All ranks have come."""
        return self.all_reduce_(mindspore.Tensor(np.ones(1, np.int32)), "sum", group, async_op)

    # --- coalesced: can_coalesce is False, so that nobody asks for these
    def all_reduce_coalesced_(self, xs: Sequence[Any], op: str, group: str, async_op: bool) -> Work | None:
        """One after the other."""
        return self._each([self.all_reduce_(x, op, group, True) for x in xs], async_op)

    def all_gather_coalesced_into(
        self, outs: Sequence[Any], xs: Sequence[Any], group: str, async_op: bool
    ) -> Work | None:
        """One after the other."""
        pairs = zip(outs, xs, strict=True)
        return self._each([self.all_gather_into(out, x, group, True) for out, x in pairs], async_op)

    def reduce_scatter_coalesced_into(
        self, outs: Sequence[Any], xs: Sequence[Any], op: str, group: str, async_op: bool
    ) -> Work | None:
        """One after the other."""
        pairs = zip(outs, xs, strict=True)
        return self._each([self.reduce_scatter_into(out, x, op, group, True) for out, x in pairs], async_op)

    def all_to_all_coalesced_into(
        self, outs: Sequence[Sequence[Any]], xs: Sequence[Sequence[Any]], group: str, async_op: bool
    ) -> Work | None:
        """``can_exchange_lists`` is False."""
        raise NotImplementedError("MindSpore exchanges one tensor at a time: use all_to_all_into")

    # --- peer memory: a capability that MindSpore lacks
    def peer_domain(self, device: str) -> str | None:
        """No device reaches another."""
        return None

    def peer_memory(self, numel: int, dtype: Any, device: str, group: str, timeout: timedelta) -> PeerMemory:
        """MindSpore maps no memory of other processes."""
        raise NotImplementedError("MindSpore has no memory that other processes reach: use collectives")

    # --- the pieces
    def _started(self, launch: Launch, finish: Callable[[], None], async_op: bool) -> Work | None:
        return started([launch], finish, self._drain, async_op=async_op)

    def _each(self, works: Sequence[Work | None], async_op: bool) -> Work | None:
        def finish() -> None:
            for work in works:
                if work is not None:
                    work.wait()

        return started([], finish, self._drain, async_op=async_op)

    def _is_me(self, rank: int) -> bool:
        return communication.get_rank() == rank

    def _gathered(self, row: Any, group: str, async_op: bool) -> tuple[list[Any], Launch]:
        """Every rank's row (of one length), and the launch. Nothing is launched for empty rows."""
        size = len(self.native_ranks(group))  # type: ignore[attr-defined]
        pieces = [mint.empty((row.size,), dtype=row.dtype) for _ in range(size)]
        if row.size == 0:
            return pieces, NO_LAUNCH
        check = self._enter_step(group, _signature("all_gather", row))  # type: ignore[attr-defined]
        return pieces, Launch(distributed.all_gather(pieces, row, group=group, async_op=async_op), check)

    def _reduced(
        self, row: Any, op: str, group: str, async_op: bool, *, may_overwrite: bool = False
    ) -> tuple[Callable[[], Any], Launch]:
        """The reduction of the ranks' rows as a function to call when the launch is done."""
        if row.size == 0:
            return lambda: row, NO_LAUNCH
        if op in ("max", "min") and NAME_OF[row.dtype] in FLOATS:  # See [Note: NaN on the way].
            keys, launch = self._reduced(ordered(row, op), op, group, async_op, may_overwrite=True)
            return lambda: of_ordered(keys(), row.dtype), launch
        if NAME_OF[row.dtype] in REDUCED_BY_KERNEL:
            total = row if may_overwrite else own_copy(row)
            check = self._enter_step(group, _signature(op, row))  # type: ignore[attr-defined]
            launch = Launch(distributed.all_reduce(total, op=op, group=group, async_op=async_op), check)
            return lambda: total, launch
        pieces, launch = self._gathered(carried(row), group, async_op)
        return lambda: _in_order(pieces, op, row.dtype), launch

    def _reduce_scatter(
        self, out: Any, row: Any, start: int, op: str, group: str, async_op: bool
    ) -> Work | None:
        with no_grad():
            total, launch = self._reduced(row, op, group, async_op)
            return self._started(
                launch, lambda: fill(out, mint.narrow(total(), 0, start, out.size)), async_op
            )

    def _from_one(self, row: Any, like: Any, group: str, async_op: bool) -> tuple[Callable[[], Any], Launch]:
        """One rank's row of integers on all ranks; ``row`` is None on the others."""
        mine = ops.zeros_like(like) if row is None else own_copy(row)
        return self._reduced(mine, "sum", group, async_op, may_overwrite=True)


def _signature(kind: str, row: Any) -> str:
    return f"{kind}/{NAME_OF[row.dtype]}/{row.size}"


def _in_order(pieces: Sequence[Any], op: str, dtype: Any) -> Any:
    """The reduction in the order of ranks, the same bits on all of them."""
    pairwise = _PAIRWISE[op]
    total = pieces[0].view(dtype)
    for piece in pieces[1:]:
        total = pairwise(total, piece.view(dtype))
    return total


def _carried_size(x: Any, size: int) -> int:
    """Length of the carried row of ``size`` elements of ``x``'s dtype; complex128 travels as two float64."""
    return size * (2 if x.dtype == mindspore.complex128 else 1)
