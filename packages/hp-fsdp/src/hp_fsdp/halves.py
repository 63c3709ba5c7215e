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

[Note: small halves] Peer memory stays while the model does, so it is small; what is larger goes through it in several turns.
"""

from __future__ import annotations

from typing import Literal

from hp_platform.group import ProcessGroup
from hp_platform.platform import Platform
from hp_platform.protocols.peer import PeerMemory
from hp_platform.protocols.tensor import DType, Tensor

HALF_NBYTES = 31 * 1024 * 1024
"""Of a half, at most."""
LARGE_NBYTES = 8 * 1024 * 1024
"""From which on a part that stays on its device is copied by a copy engine too, one call each: a kernel would take processors from
products. Smaller ones go in one launch, which costs the host less."""
ALIGNMENT = 64
"""Elements; kernels that add up like such beginnings."""
Use = Literal["gather", "exchange"]


def half_numel(use: Use, largest: int, num_ranks: int, itemsize: int) -> int:
    """Elements of a half, if the longest row has ``largest``: for an exchange with a row for every rank."""
    rows = num_ranks if use == "exchange" else 1
    longest = -(-largest // ALIGNMENT) * ALIGNMENT
    most = HALF_NBYTES // itemsize // rows // ALIGNMENT * ALIGNMENT
    return rows * max(ALIGNMENT, min(longest, most))


class Halves:
    """See [Note: two halves]."""

    def __init__(
        self, platform: Platform, group: ProcessGroup, memory: PeerMemory, dtype: DType, numel: int
    ) -> None:
        """``memory``: twice ``numel`` elements of ``dtype`` on every rank of the group."""
        self.group = group
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
        """Whether a part is large enough for a copy of its own; see :data:`LARGE_NBYTES`."""
        return numel * self._itemsize >= LARGE_NBYTES

    def turn(self) -> int:
        """Begin the next turn; which half it uses."""
        self._turn = 1 - self._turn
        return self._turn

    def of(self, half: int, rank: int) -> Tensor:
        """What lies at a rank, ``(numel,)``."""
        return self._halves[half][rank]
