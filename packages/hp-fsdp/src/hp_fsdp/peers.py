"""Which ranks reach each other's memory, and what goes through it."""

from __future__ import annotations

from collections.abc import Sequence

from hp_fsdp.halves import Use, half_numel
from hp_fsdp.peer_exchange import PeerExchange
from hp_fsdp.places import Places
from hp_platform.group import ProcessGroup
from hp_platform.halves import MAX_PEERS, Halves
from hp_platform.peers import peer_memory
from hp_platform.platform import Platform
from hp_platform.protocols.device import Repeated
from hp_platform.protocols.tensor import DType
from hp_platform.repeated import MOST_KEPT


def may_reach(platform: Platform, places: Places) -> bool:
    """Whether a shard group may be one of peers: of a machine's usual size, with devices that reach each other's memory."""
    return 1 < places.num_shards <= MAX_PEERS and platform.supports("peer_memory", places.device)


class Peers:
    """The ranks of one shard group, as far as they reach each other; hangs on what the group's units have in common."""

    def __init__(self, platform: Platform, group: ProcessGroup, device: str, largest: int) -> None:
        """``largest``: elements of the longest row that goes through it."""
        self.platform = platform
        self.group = group
        self.device = device
        self.largest = largest
        self.reach_each_other: bool | None = None
        """Whether they do; None until it was tried."""
        self._halves: dict[tuple[Use, DType], Halves | None] = {}
        self._exchanges: dict[tuple[tuple[int, ...], DType, str], PeerExchange] = {}

    def halves(self, use: Use, dtype: DType) -> Halves | None:
        """One pair for ever; None where the ranks do not reach each other.

        The first time all ranks call and wait for each other; see :func:`hp_platform.peers.peer_memory`.
        """
        key = (use, dtype)
        if key not in self._halves:
            with self.platform.recordable():  # what is made here stays
                self._halves[key] = None if self.reach_each_other is False else self._made(use, dtype)
        return self._halves[key]

    def exchange(self, sizes: Sequence[int], dtype: DType, kind: str) -> PeerExchange | None:
        """Of parts of these sizes that travel in ``dtype``; blocks of one shape have it together. None and first time as of
        :meth:`halves`.
        """
        key = (tuple(sizes), dtype, kind)
        if key not in self._exchanges:
            halves = self.halves("exchange", dtype)
            if halves is None:
                return None
            with self.platform.recordable():
                self._exchanges[key] = PeerExchange(self.platform, halves, sizes, kind, self.repeated())
        return self._exchanges[key]

    def repeated(self, most_kept: int = MOST_KEPT) -> Repeated:
        """For exchanges that come again."""
        return self.platform.device(self.device).repeated(most_kept, makes_products=False)

    def _made(self, use: Use, dtype: DType) -> Halves | None:
        numel = half_numel(use, self.largest, self.group.size, self.platform.itemsize(dtype))
        memory = peer_memory(2 * numel, dtype, self.device, self.group)
        self.reach_each_other = memory is not None
        if memory is None:
            return None
        return Halves(self.platform, self.group, memory, dtype, numel)
