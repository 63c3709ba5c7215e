"""Several ranks in one process, one after another: what the rule checker runs rules on.

[Note: replies] A rank's collective needs what the other ranks give, and they have not run yet. So all ranks run again and
again: in the first pass the first collective answers with the rank's own value, and what every rank gave is noted; in the
next pass it answers rightly, and the second one is noted; and so on, until a pass meets no new collective. Programs are the
same on all ranks of a group, so the k-th collective of one is the k-th of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hp_platform import get_platform

Tensor = Any
Coordinate = tuple[int, ...]


@dataclass
class Replies:
    """The collectives that ranks have met so far, and what they answer."""

    known: dict[Coordinate, list[Tensor]] = field(default_factory=dict)
    """By rank: what its collectives answer, in their order."""
    noted: dict[Coordinate, tuple[str, int, Tensor]] = field(default_factory=dict)
    """By rank: kind, mesh dim and value of the first collective without an answer."""
    met: dict[Coordinate, int] = field(default_factory=dict)
    """How many collectives a rank has met in this pass."""

    def answer(self, kind: str, mesh_dim: int, coordinate: Coordinate, x: Tensor) -> Tensor | None:
        """What the collective gives on this rank; None, and the value is noted, where that is not known yet."""
        place = self.met.get(coordinate, 0)
        self.met[coordinate] = place + 1
        known = self.known.setdefault(coordinate, [])
        if place < len(known):
            return known[place]
        if place == len(known):
            self.noted[coordinate] = (kind, mesh_dim, get_platform().detach(x))
        return None

    def clear(self) -> None:
        """Begin with another program."""
        self.known, self.noted, self.met = {}, {}, {}

    def settle(self, mesh_shape: tuple[int, ...]) -> bool:
        """End a pass: whether it met nothing new. AssertionError if ranks of one group met different collectives."""
        noted, self.noted, self.met = self.noted, {}, {}
        for coordinate, (kind, mesh_dim, _) in noted.items():
            before, after = coordinate[:mesh_dim], coordinate[mesh_dim + 1 :]
            line = [(*before, i, *after) for i in range(mesh_shape[mesh_dim])]
            # Groups are strangers to each other: one whose ranks all hold nothing may do nothing.
            kinds = {rank: noted[rank][:2] if rank in noted else None for rank in line}
            assert set(kinds.values()) == {(kind, mesh_dim)}, f"ranks meet different collectives: {kinds}"
            self.known[coordinate].append(_REDUCERS[kind]([noted[rank][2] for rank in line]))
        return not noted


def _sum(xs: list[Tensor]) -> Tensor:
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


def _extreme(greater: bool) -> Callable[[list[Tensor]], Tensor]:
    def reduce(xs: list[Tensor]) -> Tensor:
        best = xs[0]
        for x in xs[1:]:
            # NaN wins, as in the collective.
            wins = ((x > best) if greater else (x < best)) | (x != x)
            best = get_platform().where(wins, x, best)
        return best

    return reduce


def _product(xs: list[Tensor]) -> Tensor:
    total = xs[0]
    for x in xs[1:]:
        total = total * x
    return total


_REDUCERS: Mapping[str, Callable[[list[Tensor]], Tensor]] = {
    "sum": _sum,
    "max": _extreme(True),
    "min": _extreme(False),
    "prod": _product,
    "gather": lambda xs: get_platform().cat(xs),
}


@dataclass(frozen=True, eq=False)
class SimulatedGroup:
    """The ranks along one mesh dim of a :class:`CheckerMesh`."""

    mesh_dim: int
    size: int
    coordinate: Coordinate
    replies: Replies

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """As :func:`hp_platform.collectives.all_reduce`."""
        found = self.replies.answer(op, self.mesh_dim, self.coordinate, x)
        return get_platform().clone(get_platform().detach(x) if found is None else found)

    def all_gather(self, x: Tensor) -> Tensor:
        """As :func:`hp_platform.collectives.all_gather`."""
        platform = get_platform()
        found = self.replies.answer("gather", self.mesh_dim, self.coordinate, x)
        return platform.cat([platform.detach(x)] * self.size) if found is None else platform.clone(found)


class CheckerMesh:
    """A mesh as one of its ranks sees it, without a process for each."""

    def __init__(
        self, shape: tuple[int, ...], coordinate: Coordinate, replies: Replies | None = None
    ) -> None:
        self.shape = shape
        self.interned: dict[Any, Any] = {}
        self._coordinate = coordinate
        self._replies = Replies() if replies is None else replies

    def get_coordinate(self) -> Coordinate:
        """The rank's position."""
        return self._coordinate

    def get_group(self, mesh_dim: int) -> SimulatedGroup:
        """Stands for the process group along a mesh dim."""
        return SimulatedGroup(mesh_dim, self.shape[mesh_dim], self._coordinate, self._replies)

    def group_positions(self, mesh_dim: int) -> tuple[int, ...]:
        """For each coordinate its position in the group."""
        return tuple(range(self.shape[mesh_dim]))
