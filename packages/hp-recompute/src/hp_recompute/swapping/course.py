"""Groups of layers travel as a :class:`hp_recompute.swapping.timetable.Timetable` says."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

from hp_recompute.swapping.choices import LayerChoice
from hp_recompute.swapping.group import Group
from hp_recompute.swapping.timetable import Timetable


class Course:
    """One forward of the layers, and its backward. See [Note: what is waited for] in :mod:`hp_recompute.swapping.timetable`."""

    def __init__(self, layers: Sequence[LayerChoice], timetable: Timetable, device: str) -> None:
        self._layers, self._timetable, self._device = layers, timetable, device
        self._groups: dict[int, weakref.ref[Group]] = {}
        self.place = -1
        """Of the layer that has begun last."""

    def enter(self, place: int, group: Group) -> None:
        """A layer begins its forward, and saves to ``group``."""
        self.place = place
        self._groups[place] = weakref.ref(group)
        group.manager.pace(group, partial(self._wanted, place))
        self._make_room(place)

    def leave(self, place: int) -> None:
        """A layer has ended its forward."""
        if place == len(self._layers) - 1:
            for each in self._timetable.left_at_end:
                group = self._group(each)
                if group is not None:
                    group.wait_offload()

    def _make_room(self, place: int) -> None:
        room = self._timetable.budget_nbytes - self._layers[place].moving_nbytes
        room = room - sum(each.stays_nbytes for each in self._layers[: place + 1])
        leaving = [
            group for group in map(self._group, range(place)) if group is not None and group.is_leaving
        ]
        while leaving and sum(group.leaving_nbytes(self._device) for group in leaving) > room:
            leaving[0].wait_portion()
            leaving = [group for group in leaving if group.is_leaving]

    def _wanted(self, place: int) -> None:
        for each in self._timetable.fetches[place]:
            group = self._group(each)
            if group is not None and group.is_on_host:
                group.manager.fetch_ahead(group)

    def _group(self, place: int) -> Group | None:
        ref = self._groups.get(place)
        return None if ref is None else ref()
