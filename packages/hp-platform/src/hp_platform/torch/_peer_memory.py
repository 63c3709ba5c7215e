"""Memory of NVIDIA GPUs that other processes of the machine map, by torch's symmetric memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from hp_platform.torch._peer_copies import Pull, Push

MILLISECOND = timedelta(milliseconds=1)


class SymmetricMemory:
    """Implements :class:`hp_platform.protocols.peer.PeerMemory`.

    A copy between tensors of one device, of one dtype and without gaps is a cudaMemcpyAsync, also where the address belongs
    to another GPU; for those the driver takes a copy engine.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, device: str, group: Any, timeout: timedelta, owner: Any
    ) -> None:
        """``owner``: the device's handle, which counts the bytes. RuntimeError without memory, and for builds of torch without it."""
        try:
            # Not a part of torch that is loaded by itself.
            from torch.distributed import _symmetric_memory as symmetric
        except ImportError as error:
            raise RuntimeError(f"torch {torch.__version__} has no symmetric memory: {error}") from error
        self._symmetric = symmetric
        self._own = symmetric.empty(numel, dtype=dtype, device=device)
        self._group = group
        self._parts: list[torch.Tensor] = []
        self._batches = owner.copy_batches()
        self._timeout_ms = max(1, timeout // MILLISECOND)
        owner.peer_nbytes = owner.peer_nbytes + self._own.nbytes
        weakref.finalize(self, _forget, owner, self._own.nbytes)

    def join(self) -> None:
        """Map the others' parts."""
        own, group = self._own, self._group
        self._handle = self._symmetric.rendezvous(own, group)
        self._parts = [
            own if rank == group.rank() else self._handle.get_buffer(rank, tuple(own.shape), own.dtype)
            for rank in range(group.size())
        ]

    def of(self, rank: int) -> torch.Tensor:
        """A rank's part."""
        return self._parts[rank]

    def copy_each(self, targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Copies."""
        if torch.is_grad_enabled():  # entering and leaving costs as much as a copy
            with torch.no_grad():
                self.copy_each(targets, values)
            return
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)

    def pull(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Pull:
        """One call of the driver, where it has got it."""
        return Pull(self._batches, targets, sources)

    def push(self, places: Sequence[torch.Tensor], parts: Sequence[tuple[int, int]]) -> Push:
        """One call of the driver, where it has got it."""
        return Push(self._batches, places, parts)

    def barrier(self) -> None:
        """A kernel of one block that signals all ranks, and waits for their signals. A rank that does not come within the group's
        time-out ends in an error of CUDA, which says nothing of it: :mod:`hp_platform.diagnosis` has named it before.
        """
        self._handle.barrier(0, self._timeout_ms)


def _forget(owner: Any, nbytes: int) -> None:
    owner.peer_nbytes = owner.peer_nbytes - nbytes
