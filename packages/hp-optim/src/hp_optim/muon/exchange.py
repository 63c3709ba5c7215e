"""A batch of matrices on its way to the owners, and the results on their way back: one all-to-all each.

What travels lies in a row per pair of ranks, in the dtype of the Newton-Schulz iteration, so that nothing is sent that the
iteration would round away: in one process it is rounded as well, so the numbers are the same. (Only what float16 could not hold
before it is normalised travels in float32.) Where the platform lacks "exchange" (MindSpore on cpu) its all_to_all gathers everything
everywhere; the numbers are the same, the bytes are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_optim.muon.batches import Batch
from hp_optim.muon.pieces import cut_row, in_a_row, joined, part_of
from hp_optim.muon.routes import Place
from hp_platform import ProcessGroup, collectives
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor


class Coming:
    """Matrices on their way to this rank. It holds the memory of what is sent and comes."""

    def __init__(self, platform: Platform, batch: Batch, row: Tensor) -> None:
        """Starts the exchange. ``row (n,)``: the elements of ``batch.packed_cuts`` in the dtype that travels, on the device."""
        self._platform, self._batch = platform, batch
        route = batch.route
        num_sent, num_kept = sum(route.to_owners), sum(cut.box.volume for cut, _ in route.kept)
        sent, self._kept = platform.split(row, [num_sent, num_kept])
        self._work = (
            None if batch.group is None else exchange(sent, batch.group, route.to_owners, route.from_senders)
        )

    def wait(self) -> list[Tensor]:
        """Every stack, whole."""
        platform, route = self._platform, self._batch.route
        pieces: list[tuple[Place, Tensor]] = []
        if self._work is not None:
            arrived = cut_row(platform, self._work.wait(), [place.box.size for place in route.arriving])
            pieces.extend(zip(route.arriving, arrived, strict=True))
        places = [place for _, place in route.kept]
        kept = cut_row(platform, self._kept, [place.box.size for place in places])
        return stacked(platform, self._batch, [*pieces, *zip(places, kept, strict=True)])


class GoingBack:
    """Results on their way to the ranks that hold the parameters. It holds the memory of what is sent and comes."""

    def __init__(self, platform: Platform, batch: Batch, results: Sequence[Tensor]) -> None:
        """Starts the exchange. ``results``: one tensor per stack."""
        self._platform, self._batch = platform, batch
        route = batch.route
        found = matrices(platform, batch, results)
        # Contiguous as what arrives at other replicas: the same operations on them give the same bits.
        self._kept = [
            platform.contiguous(part_of(platform, found[place.task], place.box)) for _, place in route.kept
        ]
        self._work = self._row = None
        if batch.group is not None:
            parts = [part_of(platform, found[place.task], place.box) for place in route.returned]
            self._row = in_a_row(platform, parts, batch.lane.computed, batch.lane.device)
            self._work = exchange(self._row, batch.group, route.to_holders, route.from_owners)

    def wait(self) -> list[Tensor]:
        """The results in the order of ``batch.applied_cuts``, in the dtype of the iteration, where the parameters lie."""
        platform, batch, lane = self._platform, self._batch, self._batch.lane
        found = [] if self._work is None else [self._work.wait()]
        sizes = [cut.box.size for cut in batch.route.received]
        if lane.storage != lane.device:
            found.append(in_a_row(platform, self._kept, lane.computed, lane.device))
            row = platform.to_device(platform.cat(found), lane.storage)
            return cut_row(platform, row, [cut.box.size for cut in batch.applied_cuts])
        return [*(x for row in found for x in cut_row(platform, row, sizes)), *self._kept]


def exchange(row: Tensor, group: ProcessGroup, to: Sequence[int], come: Sequence[int]) -> Any:
    """The all-to-all that is under way; its ``wait()`` has what came, in a row."""
    return collectives.all_to_all(row, group, in_sizes=to, out_sizes=come, async_op=True)


def stacked(platform: Platform, batch: Batch, pieces: Sequence[tuple[Place, Tensor]]) -> list[Tensor]:
    """The stacks that the pieces of own matrices make up."""
    lane = batch.lane
    if platform.supports("write_into_view", lane.device):
        stacks = [
            platform.empty((len(stack.tasks), stack.rows, stack.columns), lane.sent, lane.device)
            for stack in batch.stacks
        ]
        targets = matrices(platform, batch, stacks)
        platform.foreach_copy_(
            [part_of(platform, targets[place.task], place.box) for place, _ in pieces], [x for _, x in pieces]
        )
        return stacks
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
