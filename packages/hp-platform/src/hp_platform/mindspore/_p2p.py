"""Point to point on MindSpore."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mindspore import mint
from mindspore.mint import distributed

from hp_platform.mindspore._recording import no_grad
from hp_platform.mindspore._wire import Launch, Work, carried, fill, nothing, started
from hp_platform.protocols.comm import P2P


class MindSporeP2POps:
    """Sends and receives of :class:`hp_platform.protocols.CommOps`."""

    _drain: Callable[[], None]

    def __init__(self) -> None:
        super().__init__()
        self._receives: dict[int, deque[_Receive]] = {}
        """Posted and not yet fetched, by the rank of the peer; see :meth:`recv_`."""

    def send(self, x: Any, dst: int, group: str, async_op: bool) -> Work | None:
        """To one peer; MindSpore buffers it."""
        with no_grad():
            launches = [Launch(distributed.isend(carried(x), dst, group), nothing)] if x.size else []
            return started(launches, nothing, self._drain, async_op=async_op)

    def recv_(self, x: Any, src: int, group: str, async_op: bool) -> Work | None:
        """From one peer, in the order of its sends, whatever their group.

        MindSpore's receive blocks the queue of all later work, also sends that the peer is waiting for. So it starts when it
        is waited for, after those posted earlier for the same peer.
        """
        waiting = self._receives.setdefault(src, deque())
        work = _Receive(x, src, group, waiting, self._drain)
        waiting.append(work)
        if async_op:
            return work
        work.wait()
        return None

    def batch_p2p(self, ops: Sequence[P2P], group: str) -> Sequence[Work]:
        """Sends first, which never block."""
        works: dict[int, Any] = {}
        for kind in ("send", "recv"):
            for place, (own, x, peer) in enumerate(ops):
                if own == kind:
                    start = self.send if kind == "send" else self.recv_
                    works[place] = start(x, peer, group, True)
        return [works[place] for place in range(len(ops))]


class _Receive(Work):
    """A posted receive: it starts when waited for, after the earlier ones of the same peer."""

    def __init__(
        self, x: Any, src: int, group: str, waiting: deque[_Receive], drain: Callable[[], None]
    ) -> None:
        super().__init__((), nothing, drain)
        self._x, self._src, self._group, self._waiting = x, src, group, waiting

    def _run(self) -> None:
        while self._waiting and self._waiting[0] is not self:
            earlier = self._waiting[0]
            earlier.is_completed()
        self._waiting.popleft()
        if self._x.size:
            with no_grad():
                row = carried(self._x)
                arrived = mint.empty((row.size,), dtype=row.dtype)
                distributed.irecv(arrived, self._src, self._group).wait()
                fill(self._x, arrived)
        self._drain()
