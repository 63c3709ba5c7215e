"""Memory that the devices of other ranks read and write without collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hp_platform.protocols.tensor import Tensor


class PeerMemory(Protocol):
    """The same number of elements on every rank of a group; each rank has all of them in its address space.

    Copies from and to other ranks' parts are work of the current stream, done by the device's copy engines: kernels that run
    at the same time keep all processors. Nobody knows when somebody else is done, but for :meth:`barrier`.
    """

    def join(self) -> None:
        """Reach the others' parts. All ranks call once, before anything else, and wait for each other; RuntimeError where devices
        cannot reach each other.
        """
        ...

    def of(self, rank: int) -> Tensor:
        """What the rank at this position in the group holds, 1-D; of this process its own."""
        ...

    def copy_each(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Pairs of contiguous tensors of one dtype, one copy for each; one of both may be of another rank."""
        ...

    def pull(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Callable[[], None]:
        """What copies parts of other ranks, ``sources``, into ``targets`` of this one whenever it is called, in any order. Contiguous and
        of one dtype; the tensors stay these, while the memory below targets may come and go.
        """
        ...

    def push(
        self, places: Sequence[Tensor], parts: Sequence[tuple[int, int]]
    ) -> Callable[[Sequence[Tensor]], None]:
        """What copies parts of the tensors that it is given, 1-D and contiguous, into ``places``, 1-D ones of other ranks, in any
        order. ``parts``: for each place the number of the tensor, and the first element in it. Who calls keeps the tensors until the
        stream has done it.
        """
        ...

    def barrier(self) -> None:
        """Later work of the current stream begins when all ranks' streams have come to their barrier. The host goes on."""
        ...
