"""Groups on their way to the host, in the order in which they started, and when forward waits for them."""

from __future__ import annotations

from collections.abc import Mapping

from hp_recompute.swapping.group import Group
from hp_recompute.swapping.room import Room


class Leaving:
    """Of a manager. See [Note: copies take their time] in :mod:`hp_recompute.swapping.manager`."""

    def __init__(self, rooms: Mapping[str, Room]) -> None:
        """``rooms``: of the devices."""
        self._rooms = rooms
        self._groups: list[Group] = []

    def launch(self, group: Group) -> None:
        """It starts."""
        group.launch_offload()
        self._groups.append(group)

    def passed(self, ordinal: int) -> None:
        """A group has ended: those that started before it could have left by now."""
        for each in self._groups:
            each.is_late = each.is_late or (each.ordinal < ordinal and each.on_wanted is None)

    def late_nbytes(self, device: str) -> int:
        """Of what could have left by now."""
        return sum(each.leaving_nbytes(device) for each in self._groups if each.is_late)

    def let_go(self, nbytes: int) -> None:
        """Wait for as much of that as must have left before so many bytes are made."""
        late = [each for each in self._groups if each.is_late]
        while late and any(room.lacks(nbytes) for room in self._rooms.values()):
            if late[0].is_leaving:
                late[0].wait_portion()
            else:
                late.pop(0)
        self._forget()

    def wait_for_late(self) -> None:
        """All of it."""
        self._wait_for([each for each in self._groups if each.is_late])

    def wait_for_unpaced(self, group: Group) -> None:
        """Backward begins, with ``group``: all but that, and those of which somebody else says when (:meth:`SwapManager.pace`)."""
        self._wait_for([each for each in self._groups if each is not group and each.on_wanted is None])

    def wait_for_all(self) -> None:
        """A step is over."""
        self._wait_for(self._groups)

    def stays(self, group: Group) -> None:
        """Backward has come to it, wherever it is."""
        if any(each is group for each in self._groups):
            self._groups = [each for each in self._groups if each is not group]
            group.stay()

    def _wait_for(self, groups: list[Group]) -> None:
        for each in groups:
            each.wait_offload()
        self._forget()

    def _forget(self) -> None:
        self._groups = [each for each in self._groups if each.is_leaving]
