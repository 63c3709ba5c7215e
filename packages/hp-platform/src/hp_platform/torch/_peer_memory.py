"""Memory of NVIDIA GPUs that other processes of the machine map, by torch's symmetric memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

MILLISECOND = timedelta(milliseconds=1)


class SymmetricMemory:
    """Implements :class:`hp_platform.protocols.peer.PeerMemory`.

    A copy between tensors of one device, of one dtype and without gaps is a cudaMemcpyAsync, also where the address belongs
    to another GPU; for those the driver takes a copy engine.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, device: str, group: Any, timeout: timedelta, owner: Any
    ) -> None:
        """``owner``: the device's handle, which counts the bytes."""
        # Not a part of torch that is loaded by itself; what it needs is not in every build.
        from torch.distributed import _symmetric_memory as symmetric

        own = symmetric.empty(numel, dtype=dtype, device=device)
        self._handle = symmetric.rendezvous(own, group)
        self._parts = [
            own if rank == group.rank() else self._handle.get_buffer(rank, (numel,), dtype)
            for rank in range(group.size())
        ]
        self._timeout_ms = max(1, timeout // MILLISECOND)
        owner.peer_nbytes = owner.peer_nbytes + own.nbytes
        weakref.finalize(self, _forget, owner, own.nbytes)

    def of(self, rank: int) -> torch.Tensor:
        """A rank's part."""
        return self._parts[rank]

    def copy_each(self, targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Copies."""
        with torch.no_grad():
            for target, value in zip(targets, values, strict=True):
                target.copy_(value)

    def barrier(self) -> None:
        """A kernel of one block that signals all ranks, and waits for their signals."""
        self._handle.barrier(0, self._timeout_ms)


def _forget(owner: Any, nbytes: int) -> None:
    owner.peer_nbytes = owner.peer_nbytes - nbytes
