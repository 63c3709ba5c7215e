"""Between forward and backward: whole parameters cut among fewer ranks than usual (``reshard_after_forward=n``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hp_fsdp.extension import ExtendedWhole
from hp_fsdp.whole import WholeParameters
from hp_platform import collectives
from hp_platform.group import ProcessGroup
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor


class SmallWorld:
    """After forward every rank keeps ``1 / n`` of the whole parameters; before backward ``n`` neighbours gather them.

    Gathering among neighbours (of one machine, say) is quicker, for the memory of the pieces. Storages are cut as they lie,
    whatever is in them.
    """

    def __init__(self, platform: Platform, group: ProcessGroup) -> None:
        self.platform = platform
        self.group = group
        self._pieces: list[Tensor] = []
        self._storages: list[Tensor] = []
        self._fulls: list[Tensor] = []

    @property
    def is_full(self) -> bool:
        """Whether there is something to gather from."""
        return bool(self._pieces)

    def fill(self, wholes: Sequence[WholeParameters | ExtendedWhole]) -> None:
        """Keep this rank's piece of the memory of whole parameters that are there. No communication."""
        platform = self.platform
        self._storages = [storage for whole in wholes for storage in whole.storages]
        self._fulls = [full for whole in wholes for full in whole.fulls]
        self._pieces = []
        for storage in self._storages:
            flat = platform.reshape(storage, (-1,))
            length = self._length(flat)
            start = min(self.group.rank * length, flat.shape[0])
            own = platform.narrow(flat, 0, start, min(length, flat.shape[0] - start))
            padding = length - own.shape[0]
            if padding:
                own = platform.cat([own, platform.zeros((padding,), flat.dtype, platform.device_of(flat))])
            else:
                own = platform.clone(own)
            self._pieces.append(own)

    def clear(self) -> None:
        """Free the pieces."""
        self._pieces = []

    def launch(self, async_op: bool) -> Callable[[], None]:
        """Begin to fill the whole parameters, which have memory again; what has to follow.

        The pieces are of the computation's stream: :meth:`clear` when that has waited for this, and not before.
        Communication: per storage (compute dtype) one all-gather over ``n`` ranks.
        """
        platform, group = self.platform, self.group
        given = [collectives.all_gather(piece, group, async_op=async_op) for piece in self._pieces]
        storages, fulls = self._storages, self._fulls

        def follow() -> None:
            with platform.preserve_version(fulls):
                for storage, one in zip(storages, given, strict=True):
                    flat = one.wait() if async_op else one
                    numel = math.prod(storage.shape)
                    platform.copy_(
                        storage, platform.reshape(platform.narrow(flat, 0, 0, numel), tuple(storage.shape))
                    )

        return follow

    def _length(self, flat: Tensor) -> int:
        return -(-flat.shape[0] // self.group.size)
