"""Groups of layers travel as a :class:`hp_recompute.swapping.timetable.Timetable` says."""

from __future__ import annotations

import weakref
from functools import partial

from hp_recompute.swapping.group import Group
from hp_recompute.swapping.timetable import Timetable


class Course:
    """One forward of the layers, and its backward."""

    def __init__(self, timetable: Timetable) -> None:
        self._timetable = timetable
        self._groups: dict[int, weakref.ref[Group]] = {}
        self.place = -1
        """Of the layer that has begun last."""

    def enter(self, place: int, group: Group) -> None:
        """A layer begins its forward, and saves to ``group``."""
        self.place = place
        self._groups[place] = weakref.ref(group)
        group.manager.pace(group, partial(self._wanted, place))
        for each in self._timetable.waits[place]:
            before = self._group(each)
            if before is not None:
                before.wait_offload()

    def _wanted(self, place: int) -> None:
        for each in self._timetable.fetches[place]:
            group = self._group(each)
            if group is not None and group.is_on_host:
                group.launch_load()

    def _group(self, place: int) -> Group | None:
        ref = self._groups.get(place)
        return None if ref is None else ref()
