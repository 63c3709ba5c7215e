"""Gradients that are copied into the other ranks' memory, and added up there; see [Note: copies instead of collectives] in
:mod:`hp_platform.halves`.

They travel in the dtype they come in, and are added up in that of the result: see [Note: narrow on the wire].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import NamedTuple

from hp_fsdp.batches import Batch, cut_into_batches
from hp_platform.collectives.unchecked import by_copies
from hp_platform.halves import ALIGNMENT, Halves
from hp_platform.platform import Platform
from hp_platform.protocols.device import Repeated
from hp_platform.protocols.tensor import Tensor


@dataclass(frozen=True)
class _Turn:
    """The places of one batch, in one of the halves."""

    push: Callable[[Sequence[Tensor]], None]
    """Parts of blocks go to this rank's row in the halves of the others, one rank after the other."""
    small: list[Tensor]
    """The small parts of this rank's row in its own half; see :meth:`Halves.is_large`."""
    rows: list[Tensor]
    """Of each stretch ``(ranks, numel)``: all rows in its own half."""


class _Stretch(NamedTuple):
    """Neighbouring elements of a batch that are added up at once: a large part, or all small ones between two of these."""

    offset: int
    """In the batch."""
    numel: int
    own: tuple[int, int] | None
    """Of a large part the block, and its first element there: what this rank adds is read where it lies."""


class PeerExchange:
    """Of blocks with a part for every rank: 1-D, the parts of one size one after the other. All places are known before.

    See [Note: exchanges that repeat] in :mod:`hp_fsdp.peer_gather`.
    """

    def __init__(
        self, platform: Platform, halves: Halves, sizes: Sequence[int], kind: str, repeated: Repeated
    ) -> None:
        """``sizes`` of the parts; ``kind``: the collective that it counts as; ``repeated``: for this object alone."""
        self.platform = platform
        self.halves = halves
        self._repeated = repeated
        self.kind = kind
        self._sizes = list(sizes)
        group = halves.group
        self._row_numel = halves.numel // group.size // ALIGNMENT * ALIGNMENT
        self._batches = cut_into_batches(sizes, self._row_numel)
        self._stretches = [self._in_stretches(batch) for batch in self._batches]
        self._turns = [
            [
                self._places(batch, stretches, half)
                for batch, stretches in zip(self._batches, self._stretches, strict=True)
            ]
            for half in (0, 1)
        ]
        self._small = [
            [place for place in self._parts_for(batch, group.rank) if not halves.is_large(place[2])]
            for batch in self._batches
        ]
        """Of each batch this rank's small parts: block, first element, elements."""
        self._nbytes = sum(sizes) * group.size * platform.itemsize(halves.dtype)

    def run(self, blocks: Sequence[Tensor], row: Tensor, op: str) -> None:
        """The first elements of ``row`` become the ``"sum"`` or ``"mean"`` of this rank's parts, one after the other, in its dtype.

        On the current stream. Communication: counts as one collective of all blocks.
        """
        first = self.halves.turns(len(self._batches))
        start = partial(self._start, blocks, row, op, first)
        again = partial(self._repeated.run, ("exchange", op, first), (*blocks, row), start)
        by_copies(self.kind, self.halves.group, self._nbytes, again, len(blocks))

    def _start(self, blocks: Sequence[Tensor], row: Tensor, op: str, first: int) -> None:
        """``first``: the half of the first batch."""
        platform, halves = self.platform, self.halves
        narrow, rank = platform.narrow, halves.group.rank
        for number, (batch, small) in enumerate(zip(self._batches, self._small, strict=True)):
            turn = self._turns[(first + number) % 2][number]
            turn.push(blocks)
            values = [narrow(blocks[block], 0, start, numel) for block, start, numel in small]
            platform.foreach_copy_(turn.small, values)
            halves.barrier()
            for (offset, numel, own), rows in zip(self._stretches[number], turn.rows, strict=True):
                target = narrow(row, 0, batch.start + offset, numel)
                if own is None:
                    platform.reduce_rows_(target, rows, op)
                else:
                    block, start = own
                    platform.reduce_rows_(target, rows, op, narrow(blocks[block], 0, start, numel), rank)

    def _in_stretches(self, batch: Batch) -> list[_Stretch]:
        found: list[_Stretch] = []
        for part, (block, start, numel) in zip(
            batch.parts, self._parts_for(batch, self.halves.group.rank), strict=True
        ):
            if self.halves.is_large(numel):
                found.append(_Stretch(part.offset, numel, (block, start)))
            elif found and found[-1].own is None:
                found[-1] = found[-1]._replace(numel=found[-1].numel + numel)
            else:
                found.append(_Stretch(part.offset, numel, None))
        return found

    def _parts_for(self, batch: Batch, rank: int) -> list[tuple[int, int, int]]:
        """Block, first element and elements of what goes to a rank."""
        return [(part.piece, rank * self._sizes[part.piece] + part.start, part.numel) for part in batch.parts]

    def _places(self, batch: Batch, stretches: Sequence[_Stretch], half: int) -> _Turn:
        platform, halves, numel = self.platform, self.halves, self._row_numel
        group = halves.group
        start = group.rank * numel

        def own_row(rank: int) -> list[Tensor]:
            flat = halves.of(half, rank)
            return [platform.narrow(flat, 0, start + part.offset, part.numel) for part in batch.parts]

        flat = platform.narrow(halves.of(half, group.rank), 0, 0, group.size * numel)
        rows = platform.reshape(flat, (group.size, numel))
        is_small = [not halves.is_large(part.numel) for part in batch.parts]
        return _Turn(
            push=halves.memory.push(
                [place for rank in halves.others for place in own_row(rank)],
                [
                    (block, first)
                    for rank in halves.others
                    for block, first, _ in self._parts_for(batch, rank)
                ],
            ),
            small=[*compress(own_row(group.rank), is_small)],
            rows=[platform.narrow(rows, 1, each.offset, each.numel) for each in stretches],
        )
