"""Peer memory as transport: rows that the ranks' copy engines move while products hold the processors.

See [Note: copies instead of collectives] and [Note: two halves] in :mod:`hp_platform.halves`. All layers of a group take the same halves
(:func:`hp_platform.halves.shared_halves`): what touches another rank's memory, and the barriers, are queued on the one side stream of
the device, so turns go in one order; what a rank writes to its own half by itself waits for that stream first. Two models that
are parallel over one group share them, too.

[Note: order of sums] Every rank adds up the rows of all ranks in the order of the group, in float32 for narrower dtypes, and rounds
once: the result does not depend on timing, and is as exact as a collective's or more so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor.chunk import chunk_offset, chunk_size
from hp_platform import get_platform
from hp_platform.collectives.unchecked import by_copies
from hp_platform.halves import ALIGNMENT, Halves, shared_halves
from hp_tp.overlap.matrices import Matrices
from hp_tp.overlap.policy import OverlapPolicy
from hp_tp.overlap.side_stream import SideQueue

Tensor = Any
MAX_COPIES = 16
"""Of one gather or reduction: the host starts each, so a batch of many pieces is cheaper by a collective."""


def halves_for(
    dtype: Any, device: str, features: int, rows: Matrices, policy: OverlapPolicy
) -> Halves | None:
    """Through which rows with so many features are moved; None: by collectives. The same on all ranks.

    The first time for a group, and for sizes larger than ever before, all ranks wait for each other on the host.
    """
    platform, group = get_platform(), rows.cut.group
    if not policy.copies(rows.nbytes(features, dtype)) or not platform.supports("peer_memory", device):
        return None
    numel = group.size * _row_numel(rows, features)
    nbytes = 2 * numel * platform.itemsize(dtype)
    if rows.outer * (group.size - 1) > MAX_COPIES or nbytes > policy.max_peer_nbytes:
        return None
    return shared_halves(numel, dtype, device, group)


def _row_numel(rows: Matrices, features: int) -> int:
    """Elements of the largest piece, as a row of an exchange. Of a gather a half takes one, of its backward one for each rank."""
    largest = rows.outer * max(rows.sizes) * features
    return max(1, -(-largest // ALIGNMENT)) * ALIGNMENT


def others_of(rows: Matrices) -> list[int]:
    """The other ranks' coordinates in the order in which they are visited: each begins with its neighbour."""
    own, num_ranks = rows.cut.index, len(rows.sizes)
    return [(own + step) % num_ranks for step in range(1, num_ranks)]


def steps_of(rows: Matrices, features: int, policy: OverlapPolicy) -> list[list[int]]:
    """The other ranks' coordinates, those together whose rows are multiplied at once; none if all ranks' are."""
    others, own = others_of(rows), rows.outer * rows.sizes[rows.cut.index]
    count = policy.num_products(own * features, (rows.outer * rows.total - own) * features)
    count = min(len(others), count)
    return [
        others[chunk_offset(len(others), count, step) :][: chunk_size(len(others), count, step)]
        for step in range(count)
    ]


class CopiedGather:
    """A gather under way: the own rows are in the own half, and those of the others come step by step."""

    def __init__(self, x: Tensor, rows: Matrices, halves: Halves, steps: Sequence[Sequence[int]]) -> None:
        """``x``: ``(outer, own rows, k)``, contiguous. Communication: counts as one all-gather."""
        platform = get_platform()
        device = platform.device_of(x)
        self.whole = platform.empty((rows.outer, rows.total, x.shape[-1]), x.dtype, device)
        """Filled step by step."""
        self._x, self._rows, self._halves, self._steps = platform.detach(x), rows, halves, steps
        self._queue = SideQueue(device)
        self._queue.hold(self._x, self.whole)
        self._arrived: list[Any] = []
        nbytes = rows.nbytes(x.shape[-1], x.dtype)
        self._queue.run(lambda: by_copies("all_gather", rows.cut.group, nbytes, self._run, 1))
        # As in [Note: communication goes first]: the barrier is a kernel, which must come before the product.
        self._queue.wait(self._written)

    def _run(self) -> None:
        halves, own = self._halves, self._rows.cut.index
        half = halves.turn()
        flat = _flat(self._x)
        halves.copy_each([self._place(half, own)], [flat])
        self._written = self._queue.mark()
        halves.barrier()
        for coordinates in self._steps:
            for coordinate in coordinates:
                theirs, here = _paired(self._place(half, coordinate), self._rows_of(coordinate))
                halves.copy_each(here, theirs)
            self._arrived.append(self._queue.mark())
        mine, here = _paired(flat, self._rows_of(own))
        halves.copy_each(here, mine)
        self._complete = self._queue.mark()

    def _place(self, half: int, coordinate: int) -> Tensor:
        rows = self._rows
        flat = self._halves.of(half, rows.cut.positions[coordinate])
        return get_platform().narrow(flat, 0, 0, rows.outer * rows.sizes[coordinate] * self._x.shape[-1])

    def _rows_of(self, coordinate: int) -> Tensor:
        return get_platform().narrow(
            self.whole, 1, self._rows.starts[coordinate], self._rows.sizes[coordinate]
        )

    def wait_step(self, step: int) -> None:
        """The current stream goes on when the rows of a step are in the whole."""
        self._queue.wait(self._arrived[step])

    def wait(self) -> None:
        """The current stream goes on when all rows are in the whole."""
        self._queue.wait(self._complete)


class CopiedExchange:
    """A reduction under way: the ranks' summands for this rank come into its half, the own one among them, and are added up."""

    def __init__(self, rows: Matrices, features: int, dtype: Any, device: str, halves: Halves) -> None:
        platform = get_platform()
        self._rows, self._features, self._halves = rows, features, halves
        self._kind = {"dtype": dtype, "device": device}
        self._queue = SideQueue(device)
        self._row = _row_numel(rows, features)
        self._half = halves.turn()
        size = rows.outer * rows.sizes[rows.cut.index] * features
        group = rows.cut.group
        flat = platform.narrow(halves.of(self._half, group.rank), 0, 0, group.size * self._row)
        self._summands = platform.narrow(platform.reshape(flat, (group.size, self._row)), 1, 0, size)
        self._queue.wait(self._queue.mark())  # nobody reads any more what the own summand is written over
        own = platform.narrow(flat, 0, group.rank * self._row, size)
        self.own = platform.reshape(own, (rows.outer, rows.sizes[rows.cut.index], features))
        """Where this rank's own summand belongs: in its half."""

    def send(self, x: Tensor, start: int, coordinates: Sequence[int]) -> None:
        """Rows of the summand, ``(outer, n, features)`` from row ``start`` of the whole on, go to the ranks whose rows they are."""
        platform, rows = get_platform(), self._rows
        self._queue.hold(x)

        def push() -> None:
            for coordinate in coordinates:
                size = rows.sizes[coordinate]
                flat = self._halves.of(self._half, rows.cut.positions[coordinate])
                begin = rows.cut.group.rank * self._row
                place = platform.narrow(flat, 0, begin, rows.outer * size * self._features)
                part = platform.narrow(x, 1, rows.starts[coordinate] - start, size)
                theirs, mine = _paired(place, part)
                self._halves.copy_each(theirs, mine)

        self._queue.run(push)

    def meet(self) -> None:
        """All own summands have been sent. Communication: counts as one reduce-scatter."""
        group, nbytes = self._rows.cut.group, self._rows.nbytes(self._features, self._kind["dtype"])
        meet = self._halves.barrier
        self._queue.run(lambda: by_copies("reduce_scatter", group, nbytes, meet, 1), is_behind=False)

    def add_up(self, *, is_beside: bool) -> Callable[[], Tensor]:
        """The sum ``(outer, own rows, features)``, for who waits. Beside: on the side stream; the own summand is there then.

        Else on the current stream, behind what it holds.
        """
        platform, queue = get_platform(), self._queue
        out = platform.empty(tuple(self.own.shape), **self._kind)
        flat, summands = _flat(out), self._summands

        def add() -> None:
            if 0 not in flat.shape:
                platform.reduce_rows_(flat, summands, "sum")

        if is_beside:
            queue.hold(out)
            # Behind what the computation waits for by now: a collector of garbage may have dropped somebody else's work since the sends,
            # and `out` may lie where that works.
            queue.run(add)
        mark = queue.mark()

        def wait() -> Tensor:
            queue.wait(mark)
            if not is_beside:
                add()
            return out

        return wait


def _flat(x: Tensor) -> Tensor:
    return get_platform().reshape(x, (-1,))


def _paired(flat: Tensor, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """``flat``, of as many elements as ``x (outer, n, m)``, and ``x``, as equally many blocks without gaps."""
    platform = get_platform()
    if 0 in x.shape:
        return [], []
    if platform.is_contiguous(x):
        return [flat], [_flat(x)]
    outer = x.shape[0]
    blocks = [_flat(platform.narrow(x, 0, place, 1)) for place in range(outer)]
    return platform.split(flat, [x.shape[1] * x.shape[2]] * outer), blocks
