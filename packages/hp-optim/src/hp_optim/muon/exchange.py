"""A batch of matrices on its way to the owners, and the results on their way back: one all-to-all each.

What travels lies in a row per pair of ranks, in the dtype of the Newton-Schulz iteration, so that nothing is sent that the
iteration would round away: in one process it is rounded as well, so the numbers are the same. (Only what float16 could not hold
before it is normalised travels in float32.) Where the platform lacks "exchange" (MindSpore on cpu) its all_to_all gathers everything
everywhere; the numbers are the same, the bytes are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hp_optim.muon.batches import Batch
from hp_optim.muon.pieces import cut_row, in_a_row, joined, part_of
from hp_optim.muon.ranges import Ranges, Spot
from hp_optim.muon.routes import Place
from hp_platform import ProcessGroup, collectives
from hp_platform.platform import Platform
from hp_platform.protocols.device import Repeated
from hp_platform.protocols.tensor import Tensor


class Coming:
    """Matrices on their way to this rank. It holds the memory of what is sent and comes."""

    def __init__(self, platform: Platform, batch: Batch, row: Tensor, repeated: Repeated) -> None:
        """Starts the exchange. ``row (n,)``: the elements of ``batch.packed_cuts`` in the dtype that travels, on the device."""
        self._platform, self._batch, self._repeated = platform, batch, repeated
        route = batch.route
        num_sent, num_kept = sum(route.to_owners), sum(cut.box.volume for cut, _ in route.kept)
        sent, self._kept = platform.split(row, [num_sent, num_kept])
        self._work = (
            None if batch.group is None else exchange(sent, batch.group, route.to_owners, route.from_senders)
        )

    def wait(self) -> list[Tensor]:
        """Every stack, whole."""
        platform, batch = self._platform, self._batch
        arrived = None if self._work is None else self._work.wait()
        rows = [self._kept] if arrived is None else [self._kept, arrived]
        if not batch.stacks:
            return []
        if not platform.supports("write_into_view", batch.lane.device):
            return stacked(platform, batch, arrivals(platform, batch, self._kept, arrived))
        stacks = empty_stacks(platform, batch)
        self._repeated.run(
            ("join", batch), (*stacks, *rows), lambda: join(platform, batch, stacks, self._kept, arrived)
        )
        return stacks


class Results:
    """Results of a batch where the parameters lie, in the dtype of the iteration."""

    def __init__(self, memory: Sequence[Tensor], cut: Callable[[], list[Tensor]]) -> None:
        self.memory = memory
        """What they lie in."""
        self._cut = cut

    def pieces(self) -> list[Tensor]:
        """Views, in the order of ``batch.applied_cuts``."""
        return self._cut()


class GoingBack:
    """Results on their way to the ranks that hold the parameters. It holds the memory of what is sent and comes."""

    def __init__(
        self, platform: Platform, batch: Batch, results: Sequence[Tensor], repeated: Repeated
    ) -> None:
        """Starts the exchange. ``results``: one tensor per stack."""
        self._platform, self._batch = platform, batch
        route, lane, ranges = batch.route, batch.lane, ranges_in(platform, batch)
        places = [place for _, place in route.kept]
        self._kept: Results
        if ranges is not None:
            self._kept = Results(results, lambda: kept_ranges(platform, batch, results, ranges))
        else:
            found = matrices(platform, batch, results)
            # Contiguous as what arrives at other replicas: the same operations on them give the same bits.
            pieces = [
                platform.contiguous(part_of(platform, found[place.task], place.box)) for place in places
            ]
            self._kept = Results(pieces, lambda: pieces)
        self._work = self._row = None
        if batch.group is None:
            return
        if platform.supports("write_into_view", lane.device):
            self._row = row = platform.empty((sum(route.to_holders),), lane.computed, lane.device)
            if route.returned:
                repeated.run(
                    ("return", batch), (row, *results), lambda: put_returned(platform, batch, results, row)
                )
        else:
            self._row = in_a_row(platform, returned(platform, batch, results), lane.computed, lane.device)
        self._work = exchange(self._row, batch.group, route.to_holders, route.from_owners)

    def wait(self) -> Results:
        """The results, where the parameters lie."""
        platform, batch, lane, kept = self._platform, self._batch, self._batch.lane, self._kept
        arrived = None if self._work is None else self._work.wait()
        if lane.storage != lane.device:
            found = [] if arrived is None else [arrived]
            found.append(in_a_row(platform, kept.pieces(), lane.computed, lane.device))
            row = platform.to_device(platform.cat(found), lane.storage)
            return Results(
                [row], lambda: cut_row(platform, row, [cut.box.size for cut in batch.applied_cuts])
            )
        if arrived is None:
            return kept
        sizes = [cut.box.size for cut in batch.route.received]
        return Results([arrived, *kept.memory], lambda: [*cut_row(platform, arrived, sizes), *kept.pieces()])


def exchange(row: Tensor, group: ProcessGroup, to: Sequence[int], come: Sequence[int]) -> Any:
    """The all-to-all that is under way; its ``wait()`` has what came, in a row."""
    return collectives.all_to_all(row, group, in_sizes=to, out_sizes=come, async_op=True)


def ranges_in(platform: Platform, batch: Batch) -> Ranges | None:
    """The ranges that the pieces are, where ranges of a tensor can be written."""
    return batch.ranges if platform.supports("write_into_view", batch.lane.device) else None


def cut_ranges(platform: Platform, row: Tensor, ranges: Ranges, spots: Sequence[Spot]) -> list[Tensor]:
    """The pieces of a row, flat."""
    return platform.split(row, [ranges.sizes[stack][number] for stack, number in spots]) if spots else []


def join(
    platform: Platform, batch: Batch, stacks: Sequence[Tensor], kept: Tensor, arrived: Tensor | None
) -> None:
    """Write all pieces to where they belong."""
    ranges = batch.ranges
    if ranges is None:
        targets = matrices(platform, batch, stacks)
        pieces = arrivals(platform, batch, kept, arrived)
        platform.foreach_copy_(
            [part_of(platform, targets[place.task], place.box) for place, _ in pieces], [x for _, x in pieces]
        )
        return
    spots, found = ranges.kept, cut_ranges(platform, kept, ranges, ranges.kept)
    if arrived is not None:
        spots = (*spots, *ranges.arriving)
        found.extend(cut_ranges(platform, arrived, ranges, ranges.arriving))
    parts = split_stacks(platform, stacks, ranges)
    platform.foreach_copy_([parts[stack][number] for stack, number in spots], found)


def arrivals(
    platform: Platform, batch: Batch, kept: Tensor, arrived: Tensor | None
) -> list[tuple[Place, Tensor]]:
    """The pieces of own matrices, and where they belong."""
    route = batch.route
    found: list[tuple[Place, Tensor]] = []
    if arrived is not None:
        pieces = cut_row(platform, arrived, [place.box.size for place in route.arriving])
        found.extend(zip(route.arriving, pieces, strict=True))
    places = [place for _, place in route.kept]
    found.extend(zip(places, cut_row(platform, kept, [place.box.size for place in places]), strict=True))
    return found


def kept_ranges(platform: Platform, batch: Batch, results: Sequence[Tensor], ranges: Ranges) -> list[Tensor]:
    """Of the results, what this rank holds itself."""
    parts = split_stacks(platform, results, ranges)
    return [
        platform.reshape(parts[stack][number], place.box.size)
        for (stack, number), (_, place) in zip(ranges.kept, batch.route.kept, strict=True)
    ]


def returned(platform: Platform, batch: Batch, results: Sequence[Tensor]) -> list[Tensor]:
    """Of the results, what other ranks hold, in their order."""
    ranges = ranges_in(platform, batch)
    if ranges is not None:
        parts = split_stacks(platform, results, ranges)
        return [parts[stack][number] for stack, number in ranges.returned]
    found = matrices(platform, batch, results)
    return [part_of(platform, found[place.task], place.box) for place in batch.route.returned]


def put_returned(platform: Platform, batch: Batch, results: Sequence[Tensor], row: Tensor) -> None:
    """Those in a row."""
    found = returned(platform, batch, results)
    platform.foreach_copy_(cut_row(platform, row, [tuple(x.shape) for x in found]), found)


def split_stacks(platform: Platform, stacks: Sequence[Tensor], ranges: Ranges) -> list[list[Tensor]]:
    """By stack all pieces, flat."""
    flat = [platform.reshape(x, (-1,)) for x in stacks]
    return [platform.split(x, sizes) for x, sizes in zip(flat, ranges.sizes, strict=True)]


def empty_stacks(platform: Platform, batch: Batch) -> list[Tensor]:
    """Memory for the own matrices."""
    lane = batch.lane
    return [
        platform.empty((len(stack.tasks), stack.rows, stack.columns), lane.sent, lane.device)
        for stack in batch.stacks
    ]


def stacked(platform: Platform, batch: Batch, pieces: Sequence[tuple[Place, Tensor]]) -> list[Tensor]:
    """The stacks that the pieces of own matrices make up, in new memory."""
    found: dict[int, dict[Any, Tensor]] = {}
    for place, x in pieces:
        found.setdefault(place.task, {})[place.box] = x
    return [
        platform.cat(
            [
                platform.reshape(joined(platform, found[task]), (1, stack.rows, stack.columns))
                for task in stack.tasks
            ]
        )
        for stack in batch.stacks
    ]


def matrices(platform: Platform, batch: Batch, stacks: Sequence[Tensor]) -> dict[int, Tensor]:
    """By position in the batch every matrix of the stacks, as it lies in its parameter; views where the framework can."""
    found = {}
    for stack, x in zip(batch.stacks, stacks, strict=True):
        for task, matrix in zip(stack.tasks, platform.split(x, [1] * len(stack.tasks)), strict=True):
            found[task] = platform.reshape(matrix, batch.tasks[task].box.size)
    return found
