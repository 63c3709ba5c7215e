"""Who orthogonalises what: every matrix has one owner among the ranks that hold some of it.

The owners follow from shapes and placements alone, which all ranks know, so nothing is communicated; see :func:`assign`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from hp_optim.muon.parts import Box, Sharing


class Task(NamedTuple):
    """One matrix to orthogonalise."""

    parameter: int
    """Position among the parameters of the step."""
    box: Box
    """Which block of the parameter it is."""
    rows: int
    columns: int
    kind: Hashable
    """Matrices of one shape and equal kinds are orthogonalised together."""
    sharing: Sharing

    @property
    def cost(self) -> int:
        """The work of one Newton-Schulz step, up to a factor: a product of this many multiplications dominates it."""
        return self.rows * self.columns * min(self.rows, self.columns)


def assign(tasks: Sequence[Task]) -> list[int]:
    """The owner (a global rank) of every task, such that the costs of the ranks come out even.

    What only one rank holds is that rank's. Then the dearest matrix first, each goes to the holder with the least work so far;
    of several to the one that holds most of it, so that the fewest bytes travel; then to the lowest rank. So the dearest rank
    has at most 4/3 of the least possible work where all ranks may own all (Graham, Bounds on Multiprocessing Timing Anomalies,
    1969). The order of the tasks decides between equal ones; it must be the same on all ranks that share them.
    """
    owners = [task.sharing.holders[0] for task in tasks]
    load: dict[int, int] = {}
    shared = []
    for number, task in enumerate(tasks):
        if len(task.sharing.holders) == 1:
            load[owners[number]] = load.get(owners[number], 0) + task.cost
        else:
            shared.append(number)
    for number in sorted(shared, key=lambda number: -tasks[number].cost):
        task = tasks[number]
        held = task.sharing.held
        owner = min(task.sharing.holders, key=lambda rank: (load.get(rank, 0), -held[rank], rank))
        owners[number] = owner
        load[owner] = load.get(owner, 0) + task.cost
    return owners
