"""Memory through which the ranks of one machine copy from each other, instead of communicating.

[Note: copies instead of collectives] Collectives are kernels: while they run, and while they wait for a slower rank, they hold
processors that the products beside them want. Devices of one machine can read and write each other's memory by their copy
engines, which no kernel needs. (Two NVIDIA H200, a block of 61 million bfloat16 beside products: a gather by NCCL slows them by
0.10 ms, by copies by 0.01; a float32 reduce-scatter by 0.19 ms, an exchange by copies and a sum by 0.06.)

[Note: two halves] Peer memory is used in halves, in turn, with one barrier per turn. Gather: every rank writes its own piece into
its half; barrier; it copies the pieces of all others from theirs. Who has passed the barrier of turn i knows that all others
have come to it, and so, as their stream goes in order, have done with turn i - 1, which used the other half: the one that turn
i + 1 writes to. Exchange: every rank copies its blocks into the halves of all others; barrier; it adds up what lies in its
own. The same holds.

[Note: shared halves] Runtimes whose turns all run on one stream, or in an order that all ranks keep, may use the same halves: then
they hang on the group, one pair for each dtype, and go with it. What runs on another stream has halves of its own.
"""

from __future__ import annotations

from hp_platform import peers
from hp_platform.group import ProcessGroup
from hp_platform.meeting import told
from hp_platform.platform import Platform, get_platform
from hp_platform.protocols.peer import PeerMemory
from hp_platform.protocols.tensor import DType, Tensor

LARGE_NBYTES = 1024 * 1024
"""From which on a part that stays on its device is read once, by a launch of its own: written to its half and to where it belongs at once,
or added up where it lies. All smaller ones go through the half together, in one launch, which costs the host less."""
ALIGNMENT = 64
"""Elements; kernels that add up like such beginnings."""
MAX_PEERS = 8
"""The host starts a copy per peer: beyond a machine's usual number, one launch of a collective costs it less."""


class Halves:
    """See [Note: two halves]."""

    def __init__(
        self, platform: Platform, group: ProcessGroup, memory: PeerMemory, dtype: DType, numel: int
    ) -> None:
        """``memory``: twice ``numel`` elements of ``dtype`` on every rank of the group."""
        self.group = group
        self.memory = memory
        """For what is made once: copies that come again (``pull``, ``push``)."""
        self.dtype = dtype
        self.numel = numel
        self._itemsize = platform.itemsize(dtype)
        self._halves = [
            [platform.narrow(memory.of(rank), 0, start, numel) for rank in range(group.size)]
            for start in (0, numel)
        ]
        self._turn = 0
        self.others = [rank % group.size for rank in range(group.rank + 1, group.rank + group.size)]
        """The other ranks. Each begins with its neighbour, so that not all read from one, or write to one."""
        self.copy_each = memory.copy_each
        self.barrier = memory.barrier

    def is_large(self, numel: int) -> bool:
        """Whether a part is large enough for a launch of its own; see :data:`LARGE_NBYTES`."""
        return numel * self._itemsize >= LARGE_NBYTES

    def turn(self) -> int:
        """Begin the next turn; which half it uses."""
        return self.turns(1)

    def turns(self, count: int) -> int:
        """Begin ``count`` turns, one after the other; which half the first of them uses, the second has the other one, and so on."""
        first = 1 - self._turn
        self._turn = (self._turn + count) % 2
        return first

    def of(self, half: int, rank: int) -> Tensor:
        """What lies at a rank, ``(numel,)``."""
        return self._halves[half][rank]


def shared_halves(numel: int, dtype: DType, device: str, group: ProcessGroup) -> Halves | None:
    """The group's halves for ``dtype``, of ``numel`` elements or more each; None, on all ranks, where these do not reach each other.

    See [Note: shared halves]. All ranks call with the same numbers, in the same order. The first time, and when more elements are
    wanted than ever before, they wait for each other on the host (see :func:`hp_platform.peers.peer_memory`), then also for the
    device, since the smaller halves are given back. Memory: ``2 * numel`` elements of the largest request, until the group is ended.
    """
    key = (device, dtype)
    found: Halves | None = group.halves.get(key)
    if key in group.halves and (found is None or found.numel >= numel):
        return found
    platform = get_platform()
    if found is not None:
        platform.device(device).synchronize()
        told("", group)  # nobody uses them any more
        del found, group.halves[key]
    numel = -(-numel // ALIGNMENT) * ALIGNMENT
    with platform.recordable():  # what is made here stays
        memory = None
        if 1 < group.size <= MAX_PEERS:
            memory = peers.peer_memory(2 * numel, dtype, device, group)
        made = None if memory is None else Halves(platform, group, memory, dtype, numel)
        group.halves[key] = made
    return made
