"""The matrices of a step in batches that travel together, in the order in which all ranks run them. Arithmetic only.

[Note: order of the batches] Two ranks that share two groups must start the exchanges of both in the same order. What decides
it is the order of the optimizer's parameters, which is the same on all ranks: groups follow each other as their first
parameters do. What needs no exchange comes first, so that the first exchange runs below it.

[Note: the first and the last batch] Nothing runs below the exchange that the first batch comes with, nor below the momentum that
must have moved before, nor below the way back of the last batch: these two are smaller. And a batch of small matrices is of many
parameters, which take the host longer than their products take the device. So the smallest stand in the middle, when the host
has run ahead, and the largest at both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from hp_optim.muon.owners import Task, assign
from hp_optim.muon.ranges import Ranges, ranges_of
from hp_optim.muon.routes import Cut, Route, route_of
from hp_platform import ProcessGroup
from hp_platform.protocols.tensor import DType

ENDS = (4, 2)
"""By how much the memory cap is divided for the first batch, and for the last one."""


class Stack(NamedTuple):
    """Own matrices of a batch that are orthogonalised together: a tensor ``(len(tasks), rows, columns)``."""

    tasks: tuple[int, ...]
    """Positions in the batch."""
    rows: int
    columns: int
    kind: Hashable


@dataclass(frozen=True)
class Lane:
    """What matrices of one batch have in common."""

    ranks: tuple[int, ...]
    """Global ranks, ascending, of the mesh that the parameter lies on; of a plain parameter this rank."""
    kept: DType
    """Of the momentum."""
    sent: DType
    """Of what travels."""
    computed: DType
    """Of the iteration."""
    device: str
    """Where the iteration runs."""
    storage: str
    """Where parameters and momentum lie: the same, or the host."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Matrices that travel together, seen from one rank."""

    lane: Lane
    group: ProcessGroup | None
    """Who exchanges; None if nothing travels: all ranks agree on that."""
    tasks: tuple[Task, ...]
    route: Route
    stacks: tuple[Stack, ...]
    due: tuple[int, ...]
    """Parameters of which this is the first batch on this rank: their momentum moves on before it."""

    @cached_property
    def packed_cuts(self) -> tuple[Cut, ...]:
        """What this rank sends of its local tensors, and behind it what it keeps."""
        return (*self.route.sent, *(cut for cut, _ in self.route.kept))

    @cached_property
    def ranges(self) -> Ranges | None:
        """See [Note: pieces by one split]."""
        return ranges_of(self.tasks, [stack.tasks for stack in self.stacks], self.route)

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """Positions among :attr:`packed_cuts` of those that are all that this rank has of a parameter that is due."""
        due = set(self.due)
        cuts = enumerate(self.packed_cuts)
        return tuple(at for at, cut in cuts if cut.parameter in due and cut.is_all)

    @cached_property
    def packed_size(self) -> int:
        """Elements of :attr:`packed_cuts`."""
        return sum(cut.box.volume for cut in self.packed_cuts)

    @cached_property
    def is_whole(self) -> bool:
        """Whether every cut is all that this rank has of a parameter, whose momentum moves before this batch and no other."""
        cuts = (*self.packed_cuts, *self.applied_cuts)
        return all(cut.is_all for cut in cuts) and len(self.whole) == len(self.packed_cuts) == len(self.due)

    @cached_property
    def applied_cuts(self) -> tuple[Cut, ...]:
        """What results are for on this rank: those of other owners, and behind them its own."""
        return (*self.route.received, *(cut for cut, _ in self.route.kept))


def batches_of(
    placed: Sequence[tuple[Task, Lane]],
    idle: Sequence[tuple[Task, Lane]],
    groups: Mapping[tuple[int, ...], ProcessGroup],
    rank: int,
    num_bytes: Callable[[Task, Lane], int],
    memory_cap: int,
) -> list[Batch]:
    """The batches of the global rank ``rank``. ``idle``: tasks of single ranks that count as their work, and are not done here.

    In a batch the matrices of one owner take no more than ``memory_cap``, each ``num_bytes`` of it, unless it is a single one; in the
    first and the last one less, see [Note: the first and the last batch].
    What one rank holds alone stays out of the exchanges, and of the batches of other ranks.
    """
    tasks = [task for task, _ in placed]
    owners = _owners([*placed, *idle])[: len(placed)]
    local: dict[Lane, list[int]] = {}
    shared: dict[Lane, list[int]] = {}
    for number, (task, lane) in enumerate(placed):
        if len(task.sharing.holders) > 1:
            shared.setdefault(lane, []).append(number)
        elif owners[number] == rank:
            local.setdefault(replace(lane, ranks=(rank,)), []).append(number)
    batches: list[Batch] = []
    seen: set[int] = set()
    for lane, numbers in (*local.items(), *shared.items()):
        sizes = {number: num_bytes(tasks[number], lane) for number in numbers}
        for part in _parts(tasks, owners, sizes, memory_cap):
            batch = _batch(
                [tasks[number] for number in part],
                [owners[number] for number in part],
                lane,
                groups.get(lane.ranks),
                rank,
                seen,
            )
            batches.append(batch)
    return batches


def _owners(placed: Sequence[tuple[Task, Lane]]) -> list[int]:
    """By what lies on the same ranks: of other meshes' matrices not all of these ranks may know."""
    owners = [0] * len(placed)
    by_ranks: dict[tuple[int, ...], list[int]] = {}
    for number, (_, lane) in enumerate(placed):
        by_ranks.setdefault(lane.ranks, []).append(number)
    for numbers in by_ranks.values():
        for number, owner in zip(numbers, assign([placed[number][0] for number in numbers]), strict=True):
            owners[number] = owner
    return owners


def _shape(task: Task) -> Hashable:
    return task.rows, task.columns, task.kind


def _parts(
    tasks: Sequence[Task], owners: Sequence[int], sizes: Mapping[int, int], limit: int
) -> list[list[int]]:
    """The tasks of ``sizes`` (task -> bytes) in batches: of each owner as many as fit ``limit``, matrices of one shape side by side.

    See [Note: the first and the last batch].
    """
    first: dict[Hashable, int] = {}
    for number in sizes:
        first.setdefault(_shape(tasks[number]), number)
    parts: list[list[int]] = []
    filled: dict[int, tuple[int, int]] = {}
    """Of each owner the part that it is in, and how many bytes it has there."""
    for number in sorted(sizes, key=lambda number: (-sizes[number], first[_shape(tasks[number])], number)):
        owner = owners[number]
        at, taken = filled.get(owner, (0, 0))
        if taken and taken + sizes[number] > limit // (ENDS[at] if at < len(ENDS) else 1):
            at, taken = at + 1, 0
        filled[owner] = (at, taken + sizes[number])
        while len(parts) <= at:
            parts.append([])
        parts[at].append(number)
    # From the largest to the smallest so far: every second one to the front, the others to the back.
    return [*parts[0::2], *reversed(parts[1::2])]


def _batch(
    tasks: list[Task],
    owners: list[int],
    lane: Lane,
    group: ProcessGroup | None,
    rank: int,
    seen: set[int],
) -> Batch:
    stacks: dict[Hashable, list[int]] = {}
    for number, (task, owner) in enumerate(zip(tasks, owners, strict=True)):
        if owner == rank:
            stacks.setdefault(_shape(task), []).append(number)
    route = route_of(tasks, owners, lane.ranks, rank)
    cuts = [*route.sent, *(cut for cut, _ in route.kept), *route.received]
    due = [parameter for parameter in dict.fromkeys(cut.parameter for cut in cuts) if parameter not in seen]
    seen.update(due)
    return Batch(
        group=group if len(lane.ranks) > 1 else None,
        tasks=tuple(tasks),
        route=route,
        stacks=tuple(
            Stack(tuple(found), tasks[found[0]].rows, tasks[found[0]].columns, tasks[found[0]].kind)
            for found in stacks.values()
        ),
        lane=lane,
        due=tuple(due),
    )
