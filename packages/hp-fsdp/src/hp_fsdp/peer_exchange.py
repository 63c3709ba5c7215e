"""Gradients that are copied into the other ranks' memory, and added up there; see [Note: copies instead of collectives] in
:mod:`hp_platform.halves`.

They travel in the dtype they come in, and are added up in that of the result: see [Note: narrow on the wire].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hp_fsdp.batches import Batch, cut_into_batches
from hp_platform.collectives.unchecked import by_copies
from hp_platform.halves import ALIGNMENT, Halves
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor


@dataclass(frozen=True)
class _Turn:
    """The places of one batch, in one of the halves."""

    copied: list[Tensor]
    """This rank's row in the halves of the others, one rank after the other, and its large parts in its own."""
    own: list[Tensor]
    """The small parts of this rank's row in its own half."""
    small: list[int]
    """Which of the batch's parts are small; see :meth:`Halves.is_large`."""
    large: list[int]
    rows: Tensor
    """``(ranks, numel)``: all rows in its own half."""


class PeerExchange:
    """Of blocks with a part for every rank: 1-D, the parts of one size one after the other. All places are known before."""

    def __init__(self, platform: Platform, halves: Halves, sizes: Sequence[int], kind: str) -> None:
        """``sizes`` of the parts; ``kind``: the collective that it counts as."""
        self.platform = platform
        self.halves = halves
        self.kind = kind
        self._sizes = list(sizes)
        group = halves.group
        self._row_numel = halves.numel // group.size // ALIGNMENT * ALIGNMENT
        self._batches = cut_into_batches(sizes, self._row_numel)
        self._turns = [[self._places(batch, half) for batch in self._batches] for half in (0, 1)]
        self._whole = [
            [part.piece for part in batch.parts]
            if all(part.numel == sizes[part.piece] for part in batch.parts)
            else None
            for batch in self._batches
        ]
        """Of each batch the pieces, if it has nothing but whole ones."""
        self._splits = [[size] * group.size for size in sizes]
        self._nbytes = sum(sizes) * group.size * platform.itemsize(halves.dtype)

    def run(self, blocks: Sequence[Tensor], row: Tensor, op: str) -> None:
        """The first elements of ``row`` become the ``"sum"`` or ``"mean"`` of this rank's parts, one after the other, in its dtype.

        On the current stream. Communication: counts as one collective of all blocks.
        """
        group = self.halves.group
        by_copies(self.kind, group, self._nbytes, lambda: self._run(blocks, row, op), len(blocks))

    def _run(self, blocks: Sequence[Tensor], row: Tensor, op: str) -> None:
        platform, halves, own_rank = self.platform, self.halves, self.halves.group.rank
        parts = platform.foreach_split(blocks, self._splits)
        for number, batch in enumerate(self._batches):
            turn = self._turns[halves.turn()][number]
            own = self._values(number, parts, own_rank)
            theirs = [x for rank in halves.others for x in self._values(number, parts, rank)]
            halves.copy_each(turn.copied, [*theirs, *(own[at] for at in turn.large)])
            platform.foreach_copy_(turn.own, [own[at] for at in turn.small])
            halves.barrier()
            platform.reduce_rows_(platform.narrow(row, 0, batch.start, batch.numel), turn.rows, op)

    def _values(self, number: int, parts: Sequence[Sequence[Tensor]], rank: int) -> list[Tensor]:
        whole = self._whole[number]
        if whole is not None:
            return [parts[piece][rank] for piece in whole]
        narrow, sizes, batch = self.platform.narrow, self._sizes, self._batches[number]
        return [
            parts[part.piece][rank]
            if part.numel == sizes[part.piece]
            else narrow(parts[part.piece][rank], 0, part.start, part.numel)
            for part in batch.parts
        ]

    def _places(self, batch: Batch, half: int) -> _Turn:
        platform, halves, numel = self.platform, self.halves, self._row_numel
        group = halves.group
        start = group.rank * numel

        def own_row(rank: int) -> list[Tensor]:
            flat = halves.of(half, rank)
            return [platform.narrow(flat, 0, start + part.offset, part.numel) for part in batch.parts]

        flat = platform.narrow(halves.of(half, group.rank), 0, 0, group.size * numel)
        rows = platform.reshape(flat, (group.size, numel))
        is_large = [halves.is_large(part.numel) for part in batch.parts]
        small, large = ([at for at, x in enumerate(is_large) if x is wanted] for wanted in (False, True))
        own, others = own_row(group.rank), [place for rank in halves.others for place in own_row(rank)]
        return _Turn(
            copied=[*others, *(own[at] for at in large)],
            own=[own[at] for at in small],
            small=small,
            large=large,
            rows=platform.narrow(rows, 1, 0, batch.numel),
        )
