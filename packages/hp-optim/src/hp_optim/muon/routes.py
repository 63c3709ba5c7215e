"""What each rank sends of a batch of matrices to their owners, and what comes back to it. Arithmetic only.

Both sides of a transfer work out its order from the same list of tasks: by task, and within one by piece. All offsets are in
elements, all ranks are positions in the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from hp_optim.muon.owners import Task
from hp_optim.muon.parts import Box, Held, Piece


class Cut(NamedTuple):
    """A piece of a matrix in this rank's local tensor of a parameter."""

    parameter: int
    """Position among the parameters of the step."""
    task: int
    """Position of the matrix in the batch."""
    held: Held
    box: Box
    """In what the rank holds, whose corner is the origin."""
    is_all: bool
    """Whether it is the whole local tensor. False for parts of a run."""


class Place(NamedTuple):
    """A piece of a matrix that this rank owns."""

    task: int
    """Position of the matrix in the batch."""
    box: Box
    """In the matrix, whose corner is the origin."""


T = TypeVar("T", Cut, Place)


@dataclass(frozen=True, eq=False)
class Route:
    """The part of one rank in a batch."""

    sent: tuple[Cut, ...]
    """To owners, in the order of ranks."""
    to_owners: tuple[int, ...]
    """Elements to each rank of the group."""
    arriving: tuple[Place, ...]
    """Of own matrices, in the order of the ranks that they come from."""
    from_senders: tuple[int, ...]
    """Elements from each rank of the group."""
    kept: tuple[tuple[Cut, Place], ...]
    """Of own matrices, what this rank holds itself."""
    returned: tuple[Place, ...]
    """What each rank holds of own matrices, in the order of ranks. In a group of replicas these are more than they came from."""
    to_holders: tuple[int, ...]
    received: tuple[Cut, ...]
    """What this rank holds of other ranks' matrices, in the order of their owners."""
    from_owners: tuple[int, ...]


def route_of(tasks: Sequence[Task], owners: Sequence[int], ranks: Sequence[int], rank: int) -> Route:
    """The part of the global rank ``rank`` in the exchange of these tasks within the group of ``ranks``.

    A rank sends what it holds of a matrix to the owner, if both are of one replica; the owner sends to every other holder, of
    all replicas, what that holds of the result.
    """
    sent: dict[int, list[Cut]] = {other: [] for other in ranks}
    received: dict[int, list[Cut]] = {other: [] for other in ranks}
    arriving: dict[int, list[Place]] = {other: [] for other in ranks}
    returned: dict[int, list[Place]] = {other: [] for other in ranks}
    kept: list[tuple[Cut, Place]] = []
    for number, (task, owner) in enumerate(zip(tasks, owners, strict=True)):
        sharing = task.sharing
        mine = sharing.pieces.get(rank, ())
        if owner != rank:
            cuts = [_cut(number, task, piece) for piece in mine]
            received[owner].extend(cuts)
            if mine and rank in sharing.senders(owner):
                sent[owner].extend(cuts)
            continue
        senders = sharing.senders(owner)
        for other, pieces in sharing.pieces.items():
            places = [Place(number, piece.box.inside(task.box)) for piece in pieces]
            if other == rank:
                kept.extend(
                    (_cut(number, task, piece), place) for piece, place in zip(mine, places, strict=True)
                )
                continue
            returned[other].extend(places)
            if other in senders:
                arriving[other].extend(places)
    cuts_sent, to_owners = _in_order(sent, ranks)
    places_arriving, from_senders = _in_order(arriving, ranks)
    places_returned, to_holders = _in_order(returned, ranks)
    cuts_received, from_owners = _in_order(received, ranks)
    return Route(
        sent=cuts_sent,
        to_owners=to_owners,
        arriving=places_arriving,
        from_senders=from_senders,
        kept=tuple(kept),
        returned=places_returned,
        to_holders=to_holders,
        received=cuts_received,
        from_owners=from_owners,
    )


def _cut(number: int, task: Task, piece: Piece) -> Cut:
    held = piece.held
    is_all = held.start is None and piece.box == held.box
    return Cut(task.parameter, number, held, piece.box.inside(held.box), is_all)


def _in_order(found: dict[int, list[T]], ranks: Sequence[int]) -> tuple[tuple[T, ...], tuple[int, ...]]:
    sizes = tuple(sum(each.box.volume for each in found[rank]) for rank in ranks)
    return tuple(each for rank in ranks for each in found[rank]), sizes
