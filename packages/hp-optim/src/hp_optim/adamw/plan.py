"""How the parameters of a group are updated: which of them as flat rows, which in pieces, and the rest as they are."""

from __future__ import annotations

from operator import is_
from typing import Any

from hp_optim.adamw.kernel import Launches, moments
from hp_optim.adamw.member import Member, count_of
from hp_optim.adamw.replicas import Division, division_of
from hp_optim.adamw.rows import RowOfMembers
from hp_optim.base import STEP
from hp_optim.checks import PARAMS
from hp_optim.groups import Group
from hp_optim.pieces import local_of
from hp_platform.platform import Platform
from hp_platform.protocols.flat_shards import FLAT_SHARDS, FlatRow
from hp_platform.protocols.tensor import Tensor

Divided = list[tuple[Any, Division]]


class GroupPlan:
    """Worked out once, and again when the group or the place of a shard is another one."""

    def __init__(self, platform: Platform, group: Group, state: Any, *, divides: bool) -> None:
        self.platform = platform
        self.group = group
        self.is_stale = False
        self._params = tuple(group[PARAMS])
        members = [
            Member(platform, p, state, division_of(platform, p) if divides else None) for p in self._params
        ]
        self.rows, self.loose = _rows(platform, members, state)

    def fits(self, group: Group) -> bool:
        """Whether it was made of this group as it is now."""
        params = group[PARAMS]
        return (
            not self.is_stale
            and self.group is group
            and len(params) == len(self._params)
            and all(map(is_, params, self._params))
        )

    def step(self) -> Divided:
        """Update; returns the parameters of which other replicas have updated the other pieces.

        One launch for all that are in the same step, of one dtype and on one device.
        """
        group = self.group
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
        group[STEP] = group.get(STEP, 0) + 1
        launches = Launches(self.platform, group)
        for row, gradients in flat:
            state = row.state_of(group, gradients)
            if state is None:
                given.extend((member, member.gradient()) for member in row.members)
            else:
                launches.add(row.members[0].device, group[STEP] - row.missed, row.row, gradients, state)
        divided: Divided = []
        keys = moments(group)
        for member, gradient in given:
            if gradient is None:
                member.count_a_miss()
                continue
            entry = member.entry(group, gradient)
            state = [local_of(entry[key]) for key in keys]
            launches.add(member.device, count_of(group, entry), member.target(), gradient, state)
            if member.division is not None:
                divided.append((member.parameter, member.division))
        launches.run()
        return divided


def _rows(platform: Platform, members: list[Member], state: Any) -> tuple[list[RowOfMembers], list[Member]]:
    """Flat rows all of whose parameters are here, and the members that are in none."""
    by_id = {id(member.parameter): member for member in members if member.division is None}
    found: dict[int, FlatRow] = {}
    for member in by_id.values():
        flat = getattr(member.parameter, FLAT_SHARDS, None)
        row = None if flat is None else flat.row_of(member.parameter)
        if row is not None:
            found[id(row)] = row
    rows = [
        RowOfMembers(platform, row, [by_id[id(p)] for p in row.parameters], state)
        for row in found.values()
        if all(id(p) in by_id for p in row.parameters)
    ]
    in_rows = {id(member) for row in rows for member in row.members}
    return rows, [member for member in members if id(member) not in in_rows]
