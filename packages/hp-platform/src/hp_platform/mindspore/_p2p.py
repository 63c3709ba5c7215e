"""Point to point on CPU: messages through the key-value store.

[Note: one row of messages per pair] MindSpore's CPU build matches messages by pair of ranks and order alone, not by group or
kind: an all_reduce takes the message of an earlier ``isend`` that its receiver has not fetched yet for one of its own,
silently. And its receive blocks the queue of all later work, also sends that the peer is waiting for. Messages in the
store have names (group, sender, receiver, number), so nothing can be mistaken and nothing blocks; they pass through rank 0,
which is slower and does not matter where this backend is for trying programs out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import communication, mint

from hp_platform.mindspore._recording import no_grad
from hp_platform.mindspore._store import Store
from hp_platform.mindspore._wire import Work, carried, fill, nothing, started
from hp_platform.protocols.comm import P2P

_POLL_SECONDS = 0.001


class PeerTimeoutError(RuntimeError):
    """A peer did not send in time."""


class MindSporeP2POps:
    """Sends and receives of :class:`hp_platform.protocols.CommOps`."""

    _store: Store | None

    def send(self, x: Any, dst: int, group: str, async_op: bool) -> Work | None:
        """To one peer; the store keeps it until it is fetched."""
        if x.size:
            key = self._message(group, communication.get_rank(), dst)
            with no_grad():
                row = carried(x)
                if x.size == 1:
                    # MindSpore crashes when it views one element that was 0-d as several bytes; a copy of it is sound.
                    row = mint.cat([row, mint.empty((0,), dtype=row.dtype)])
                self._shared_store().set(key, row.view(mindspore.uint8).asnumpy().tobytes())
        return started([], nothing, nothing, async_op=async_op)

    def recv_(self, x: Any, src: int, group: str, async_op: bool) -> Work | None:
        """From one peer, in the order of its sends in this group."""
        if x.size == 0:
            return started([], nothing, nothing, async_op=async_op)
        work = _Receive(x, src, self._message(group, src, communication.get_rank()), self._shared_store())
        if async_op:
            return work
        work.wait()
        return None

    def batch_p2p(self, ops: Sequence[P2P], group: str) -> Sequence[Work]:
        """No order can block: sends are kept, receives begin when waited for."""
        starts = {"send": self.send, "recv": self.recv_}
        works = [starts[kind](x, peer, group, True) for kind, x, peer in ops]
        return [work for work in works if work is not None]

    def _message(self, group: str, src: int, dst: int) -> str:
        way = f"message/{group}/{src}/{dst}"
        return f"{way}/{self._shared_store().number(way)}"

    def _shared_store(self) -> Store:
        if self._store is None:
            raise RuntimeError("there is no world to send in: call init_process_group() first")
        return self._store


class _Receive(Work):
    """A posted receive; the message is fetched when waited for."""

    def __init__(self, x: Any, src: int, key: str, store: Store) -> None:
        super().__init__((), nothing, nothing)
        self._x, self._src, self._key, self._store = x, src, key, store

    def is_completed(self) -> bool:
        """Whether the message has come."""
        return self._done or self._store.has(self._key)

    def _run(self) -> None:
        deadline = time.monotonic() + self._store.seconds
        while (message := self._store.get(self._key)) is None:
            if time.monotonic() > deadline:
                raise PeerTimeoutError(
                    f"recv: nothing has come from rank {self._src} within {self._store.seconds:g} s"
                )
            time.sleep(_POLL_SECONDS)
        self._store.forget(self._key)
        with no_grad():
            row = carried(self._x)
            arrived = mindspore.Tensor(np.frombuffer(message, np.uint8).copy()).view(row.dtype)
            if arrived.size != row.size:
                raise ValueError(
                    f"recv: rank {self._src} sent {len(message)} bytes, which do not fill a tensor of shape {tuple(self._x.shape)}"
                )
            fill(self._x, arrived)
