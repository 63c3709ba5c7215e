"""Collectives of MindSpore where the device has kernels for them (Ascend), through its public API. Not run on hardware."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from mindspore import mint
from mindspore.mint import distributed

from hp_platform.mindspore._comm import MindSporeCommOps
from hp_platform.mindspore._dtypes import NAME_OF, resolve
from hp_platform.mindspore._ordered import FLOATS, of_ordered, ordered
from hp_platform.mindspore._recording import no_grad
from hp_platform.mindspore._wire import NO_LAUNCH, Launch, Work, carried, fill, nothing
from hp_platform.protocols.comm import P2P

_REDUCIBLE = frozenset({"float32", "float16", "bfloat16", "int64", "int32", "int16", "int8"})


class NativeCommOps(MindSporeCommOps):
    """Those collectives that are composed on CPU and are one launch here."""

    # Results are ready in the order of the stream: the host waits for nothing.
    _drain = staticmethod(nothing)

    def can_reduce(self, dtype: Any, device_type: str) -> bool:
        """HCCL reduces no float64 and no uint8."""
        return NAME_OF[resolve(dtype)] in _REDUCIBLE

    def all_gather_into(self, out: Any, x: Any, group: str, async_op: bool) -> Work | None:
        """``out`` becomes the ranks' tensors."""
        if out.size == 0:
            return self._started(NO_LAUNCH, nothing, async_op)
        with no_grad():
            handle = distributed.all_gather_into_tensor(
                carried(out), carried(x), group=group, async_op=async_op
            )
        return self._started(Launch(handle, nothing), nothing, async_op)

    def reduce_scatter_into(self, out: Any, x: Any, op: str, group: str, async_op: bool) -> Work | None:
        """``out`` becomes this rank's block."""
        if out.size == 0:
            return self._started(NO_LAUNCH, nothing, async_op)
        with no_grad():
            if op in ("max", "min") and NAME_OF[x.dtype] in FLOATS:  # See [Note: NaN on the way].
                keys = ordered(x, op)
                own = mint.empty(tuple(out.shape), dtype=keys.dtype)
                handle = distributed.reduce_scatter_tensor(own, keys, op=op, group=group, async_op=async_op)
                finish = partial(_fill_ordered, out, own)
                return self._started(Launch(handle, nothing), finish, async_op)
            handle = distributed.reduce_scatter_tensor(out, x, op=op, group=group, async_op=async_op)
        return self._started(Launch(handle, nothing), nothing, async_op)

    def all_to_all_into(
        self,
        out: Any,
        x: Any,
        out_sizes: Sequence[int],
        in_sizes: Sequence[int],
        group: str,
        async_op: bool,
    ) -> Work | None:
        """Blocks of dim 0 change places."""
        with no_grad():
            handle = distributed.all_to_all_single(
                out, x, list(out_sizes), list(in_sizes), group=group, async_op=async_op
            )
        return self._started(Launch(handle, nothing), nothing, async_op)

    def broadcast_(self, x: Any, src: int, group: str, async_op: bool) -> Work | None:
        """``x`` becomes that of ``src``."""
        if x.size == 0:
            return self._started(NO_LAUNCH, nothing, async_op)
        with no_grad():
            handle = distributed.broadcast(carried(x), src, group=group, async_op=async_op)
        return self._started(Launch(handle, nothing), nothing, async_op)

    def send(self, x: Any, dst: int, group: str, async_op: bool) -> Work | None:
        """To one peer."""
        with no_grad():
            handle = distributed.isend(carried(x), dst, group) if x.size else None
        return self._started(Launch(handle, nothing), nothing, async_op)

    def recv_(self, x: Any, src: int, group: str, async_op: bool) -> Work | None:
        """From one peer."""
        with no_grad():
            handle = distributed.irecv(carried(x), src, group) if x.size else None
        return self._started(Launch(handle, nothing), nothing, async_op)

    def batch_p2p(self, ops: Sequence[P2P], group: str) -> Sequence[Work]:
        """All in one launch."""
        kinds = {"send": distributed.isend, "recv": distributed.irecv}
        wanted = [distributed.P2POp(kinds[kind], carried(x), peer, group) for kind, x, peer in ops if x.size]
        with no_grad():
            handles = distributed.batch_isend_irecv(wanted) if wanted else []
        launches = [Launch(handle, nothing) for handle in handles]
        return [Work(launches, nothing, self._drain) for _ in ops]


def _fill_ordered(out: Any, keys: Any) -> None:
    fill(out, of_ordered(keys, out.dtype).view((out.size,)))
