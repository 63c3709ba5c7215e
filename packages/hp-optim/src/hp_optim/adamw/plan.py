"""How the parameters of a group are updated: which of them as flat rows, which in pieces, and the rest as they are."""

from __future__ import annotations

from operator import is_
from typing import Any, NamedTuple

from hp_optim.adamw.kernel import Launches, moments
from hp_optim.adamw.member import Member, count_of
from hp_optim.adamw.replicas import Place, division_of, place_of
from hp_optim.adamw.rows import RowOfMembers, RowOfPieces
from hp_optim.base import STEP
from hp_optim.checks import NAMES, PARAMS
from hp_optim.groups import Group
from hp_optim.offload.home import OFFLOAD_STATE, StateHome
from hp_optim.pieces import local_of
from hp_platform import ProcessGroup
from hp_platform.platform import Platform
from hp_platform.protocols.flat_shards import FLAT_SHARDS, FlatRow
from hp_platform.protocols.tensor import Tensor


class Found(NamedTuple):
    """The gradients of a group at one step."""

    flat: list[tuple[RowOfMembers, Tensor]]
    """Rows, and their rows of gradients."""
    given: list[tuple[Member, Tensor | None]]
    """All others."""


class GroupPlan:
    """Worked out once, and again when the group or the place of a shard is another one."""

    def __init__(
        self, platform: Platform, group: Group, state: Any, home: StateHome, *, divides: bool
    ) -> None:
        self.platform = platform
        self.group = group
        self.home = home
        self._state = state
        self.is_stale = False
        self._params = tuple(group[PARAMS])
        members = [
            Member(platform, p, state, division_of(platform, p) if divides else None, home)
            for p in self._params
        ]
        self.rows, self.loose = _rows(platform, members, state)
        self._places = {id(member): place for place, member in enumerate(members)}
        divisions = [member.division for member in members if member.division is not None]
        self.replicas: dict[tuple[int, ...], ProcessGroup] = {d.group.ranks: d.group for d in divisions}
        """The groups of replicas that divide parameters, by their ranks."""

    def fits(self, group: Group, state: Any) -> bool:
        """Whether it was made of this group as it is now, and of the dict that is the optimizer's state now."""
        params = group[PARAMS]
        return (
            not self.is_stale
            and self.group is group
            and self._state is state
            and self.home.offloads == group[OFFLOAD_STATE]
            and len(params) == len(self._params)
            and all(map(is_, params, self._params))
        )

    def look(self) -> Found:
        """For gradients, where they lie now. Nothing is changed."""
        flat: list[tuple[RowOfMembers, Tensor]] = []
        given: list[tuple[Member, Tensor | None]] = []
        for row in self.rows:
            stands = row.stands()
            self.is_stale = self.is_stale or not stands
            gradients = row.gradients() if stands else None
            if gradients is None:
                given.extend((member, member.gradient()) for member in row.members)
            else:
                flat.append((row, gradients))
        given.extend((member, member.gradient()) for member in self.loose)
        return Found(flat, given)

    def absent(self, found: Found) -> list[tuple[tuple[int, ...], int, str]]:
        """Of parameters that are divided and have no gradient: the ranks of the replicas, the number in the group, a name."""
        lacking = [
            (self._places[id(member)], member)
            for member, gradient in found.given
            if gradient is None and member.division is not None
        ]
        names = self.group.get(NAMES)
        return [
            (
                member.division.group.ranks,
                place,
                f"of shape {tuple(member.parameter.shape)}" if names is None else names[place],
            )
            for place, member in sorted(lacking, key=lambda pair: pair[0])
            if member.division is not None
        ]

    def step(self, found: Found) -> list[Place]:
        """Update; returns where pieces belong that other replicas have updated.

        One launch for all that are in the same step, of one dtype and on one device.
        """
        group, flat, given = self.group, found.flat, found.given
        group[STEP] = group.get(STEP, 0) + 1
        launches = Launches(self.platform, group, self.home)
        places: list[Place] = []
        for row, gradients in flat:
            if row.add_to(launches, gradients):
                places.extend(row.places())
            else:
                given.extend((member, member.gradient()) for member in row.members)
        keys = moments(group)
        for member, gradient in given:
            if gradient is None:
                member.count_a_miss()
                continue
            entry = member.entry(group, gradient)
            state = [local_of(entry[key]) for key in keys]
            launches.add(member.device, count_of(group, entry), member.target(), gradient, state)
            if member.division is not None:
                place = place_of(self.platform, member.parameter, member.division)
                if place is not None:
                    places.append(place)
        launches.run()
        return places


def _rows(platform: Platform, members: list[Member], state: Any) -> tuple[list[RowOfMembers], list[Member]]:
    """Flat rows all of whose parameters are here, and the members that are in none."""
    by_id = {id(member.parameter): member for member in members}
    found: dict[int, FlatRow] = {}
    for member in members:
        flat = getattr(member.parameter, FLAT_SHARDS, None)
        row = None if flat is None else flat.row_of(member.parameter)
        if row is not None:
            found[id(row)] = row
    rows: list[RowOfMembers] = []
    for row in found.values():
        in_row = [by_id.get(id(parameter)) for parameter in row.parameters]
        own = [member for member in in_row if member is not None]
        divided = {member.division is not None for member in own}
        if len(own) == len(in_row) and len(divided) == 1:
            kind = RowOfPieces if divided.pop() else RowOfMembers
            rows.append(kind(platform, row, own, state))
    in_rows = {id(member) for row in rows for member in row.members}
    return rows, [member for member in members if id(member) not in in_rows]
