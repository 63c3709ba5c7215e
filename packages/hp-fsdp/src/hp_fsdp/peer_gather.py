"""Whole parameters filled by copies from the other ranks' memory; see [Note: copies instead of collectives] in
:mod:`hp_platform.halves`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress

from hp_fsdp.batches import Batch, Part, cut_into_batches
from hp_platform.collectives.unchecked import by_copies
from hp_platform.halves import Halves
from hp_platform.platform import Platform
from hp_platform.protocols.device import Repeated
from hp_platform.protocols.tensor import Tensor


@dataclass(frozen=True)
class _Turn:
    """The places of one batch, in one of the halves."""

    small: list[Tensor]
    """Where this rank's small pieces are written: in its half, for the others, and behind that where the parameters have them. See
    :meth:`Halves.is_large`."""
    large_in_half: list[Tensor]
    large_targets: list[Tensor]
    """Where the parameters have the large ones."""
    pull: Callable[[], None]
    """The others' pieces come where they belong."""


class PeerGather:
    """Of parameters whose chunks, one after the other, are the parameters. All places are known before the first gather.

    [Note: exchanges that repeat] An exchange is a dozen launches and more: a cast, a barrier and copies for every turn. In a loop it comes
    again with the same pieces, in the same half, and in memory that the allocator gives in the same order: then it is one launch
    where the device keeps launches. Pieces that are made anew for every gather are not waited for.
    """

    def __init__(
        self,
        platform: Platform,
        halves: Halves,
        targets: Sequence[Tensor],
        sizes: Sequence[int],
        memory: Sequence[Tensor],
        repeated: Repeated,
    ) -> None:
        """``targets``: ``(ranks * size,)`` for each of ``sizes``, in the dtype of the halves; ``memory``: tensors that say where these
        lie; ``repeated``: for this object alone.
        """
        self.platform = platform
        self.halves = halves
        self._memory = list(memory)
        self._repeated = repeated
        self._sizes = list(sizes)
        self._batches = cut_into_batches(sizes, halves.numel)
        self._turns = [[self._places(batch, targets, half) for batch in self._batches] for half in (0, 1)]
        self._pieces: Sequence[Tensor] = ()
        self._values: list[tuple[list[Tensor], list[Tensor]]] = []
        """What of :attr:`_pieces` is written in each batch: to the small places, and to the large ones."""
        self._num_lists = 0
        """How many lists of pieces there have been."""
        self._nbytes = sum(sizes) * halves.group.size * platform.itemsize(halves.dtype)

    def run(self, pieces: Sequence[Tensor]) -> None:
        """``pieces``: this rank's, 1-D of ``sizes``, in any dtype. The same list is taken apart once. On the current stream.

        Communication: counts as one all-gather.
        """
        is_known = pieces is self._pieces
        if not is_known:
            self._pieces, self._values = pieces, self._taken_apart(pieces)
            self._num_lists = self._num_lists + 1
        first = self.halves.turns(len(self._batches))
        start: Callable[[], None] = partial(self._start, first)
        if is_known:
            name = ("gather", self._num_lists, first)
            start = partial(self._repeated.run, name, self._memory, start)
        by_copies("all_gather", self.halves.group, self._nbytes, start, len(pieces))

    def forget(self) -> None:
        """Hold the pieces no longer."""
        self._pieces, self._values = (), []

    def _start(self, first: int) -> None:
        """``first``: the half of the first batch."""
        halves = self.halves
        for number, (small, large) in enumerate(self._values):
            turn = self._turns[(first + number) % 2][number]
            self.platform.foreach_copy_(turn.small, small)
            if large:
                self.platform.foreach_copy_both_(turn.large_in_half, turn.large_targets, large)
            halves.barrier()
            turn.pull()

    def _taken_apart(self, pieces: Sequence[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
        found = []
        for batch in self._batches:
            small: list[Tensor] = []
            large: list[Tensor] = []
            for part in batch.parts:
                is_large = self.halves.is_large(part.numel)
                (large if is_large else small).append(self._value(pieces[part.piece], part))
            found.append(([*small, *small], large))
        return found

    def _value(self, piece: Tensor, part: Part) -> Tensor:
        if part.numel == self._sizes[part.piece]:
            return piece
        return self.platform.narrow(piece, 0, part.start, part.numel)

    def _places(self, batch: Batch, targets: Sequence[Tensor], half: int) -> _Turn:
        narrow, group = self.platform.narrow, self.halves.group

        def in_targets(rank: int) -> list[Tensor]:
            return [
                narrow(targets[part.piece], 0, rank * self._sizes[part.piece] + part.start, part.numel)
                for part in batch.parts
            ]

        def in_half(rank: int) -> list[Tensor]:
            flat = self.halves.of(half, rank)
            return [narrow(flat, 0, part.offset, part.numel) for part in batch.parts]

        is_large = [self.halves.is_large(part.numel) for part in batch.parts]
        is_small = [not large for large in is_large]
        own_targets, own_half = in_targets(group.rank), in_half(group.rank)
        others = self.halves.others
        return _Turn(
            small=[*compress(own_half, is_small), *compress(own_targets, is_small)],
            large_in_half=[*compress(own_half, is_large)],
            large_targets=[*compress(own_targets, is_large)],
            pull=self.halves.memory.pull(
                [place for rank in others for place in in_targets(rank)],
                [place for rank in others for place in in_half(rank)],
            ),
        )
