"""Work that a device does again and again on the same memory, started by one launch where the device can keep it.

[Note: work that repeats] The first time work is done as it is, which compiles kernels and lets libraries take what they need. If it comes again
on the same memory it is recorded, and from then on the record is launched. Nothing is known of an address but what the caller says:
tensors whose address, dtype, shape and strides are the same, under the same name, are the same work. What the loop of a program
allocates has the same address in almost every turn; another address is other work. So a record holds no memory, and
the tensors may be freed between its runs.

[Note: records that go] As many are kept as are in use, up to a bound; what comes beyond it is done as it is. If the one that was not used for
longest has not come for many runs, memory lies elsewhere now: then all go, when the device has ended them, and those that come
again begin anew. One by one they could not go: a record of products writes into the workspaces that a library keeps for
the stream, and since 2.12 torch frees these with any record of that stream. For the same reason a name that could not be recorded
once is not tried again.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from hp_platform.protocols.device import Event
from hp_platform.protocols.tensor import Tensor

MOST_KEPT = 128
"""Records of one object, unless it is told otherwise. A record of a hundred launches takes the device some 100 KB."""
MOST_REMEMBERED = 1024
"""Works of one object that have been met and have no record; and runs after which a record that has not come is not in use."""


class Record(Protocol):
    """Work that a device has recorded."""

    def launch(self) -> None:
        """Start it on the current stream, which is the one that it was recorded for."""
        ...

    def mark(self) -> Event:
        """Behind all that has been started of it."""
        ...


class Recorder(Protocol):
    """What a device does for :class:`RepeatedWork`."""

    def place(self, tensors: Sequence[Tensor]) -> Hashable | None:
        """The current stream, and all else that work on ``tensors`` depends on and nobody names; None where nothing can be recorded, as
        while the caller records.
        """
        ...

    def layout(self, x: Tensor) -> Hashable:
        """Where and how ``x`` lies in memory."""
        ...

    def first(self, work: Callable[[], None]) -> None:
        """Do what may be recorded next time, on the stream that it would be recorded on."""
        ...

    def record(self, work: Callable[[], None]) -> Record:
        """Record what ``work`` starts, without its being done. RuntimeError, and all is as before, for what cannot be recorded."""
        ...

    def count_writes(self, xs: Sequence[Tensor]) -> None:
        """Count one for each."""
        ...


class _Kept:
    """A record, and in which run it was used last."""

    __slots__ = ("last", "record")

    def __init__(self, record: Record, last: int) -> None:
        self.record, self.last = record, last


class RepeatedWork:
    """See [Note: work that repeats], and :class:`hp_platform.protocols.device.Repeated`."""

    def __init__(
        self, recorder: Recorder, *, most_kept: int = MOST_KEPT, most_remembered: int = MOST_REMEMBERED
    ) -> None:
        self._recorder = recorder
        self._most_kept, self._most_remembered = most_kept, most_remembered
        self._records: OrderedDict[Hashable, _Kept] = OrderedDict()
        """The least recently used one first."""
        self._met: OrderedDict[Hashable, bool] = OrderedDict()
        """Work without a record, the longest unmet first: whether it can be recorded."""
        self._leaving: list[tuple[Event, Record]] = []
        """Records that are not used any more, which the device may be at still."""
        self._num_runs = 0
        self.failures: dict[Hashable, str] = {}
        self.num_launched = 0

    @property
    def is_paused(self) -> bool:
        """See the Protocol."""
        return self._recorder.place(()) is None

    def run(
        self,
        name: Hashable,
        tensors: Sequence[Tensor],
        work: Callable[[], None],
        written: Sequence[Tensor] = (),
    ) -> None:
        """See the Protocol."""
        recorder = self._recorder
        place = recorder.place(tensors)
        if place is None:
            work()
            return
        self._num_runs = self._num_runs + 1
        key = (name, place, *map(recorder.layout, tensors))
        found = self._records.get(key)
        if found is not None:
            self._records.move_to_end(key)
            self._launch(found)
            if written:
                recorder.count_writes(written)
            return
        has_room = not self._met.get(key) or self._has_room()
        can_be_recorded = self._met.pop(key, None)
        if can_be_recorded and has_room:
            found = self._recorded(key, name, work)
            if found is not None:
                # The work has counted its writes while it was recorded.
                self._launch(found)
                return
            can_be_recorded = False
        self._met[key] = can_be_recorded is not False
        if len(self._met) > self._most_remembered:
            self._met.popitem(last=False)
        if can_be_recorded is None:
            recorder.first(work)
        else:
            work()

    def _launch(self, kept: _Kept) -> None:
        kept.record.launch()
        kept.last = self._num_runs
        self.num_launched = self.num_launched + 1

    def _has_room(self) -> bool:
        """See [Note: records that go]."""
        if self._leaving:
            self._leaving = [(event, record) for event, record in self._leaving if not event.query()]
            if not self._leaving:
                self._met.clear()
            return False
        if len(self._records) < self._most_kept:
            return True
        oldest = next(iter(self._records.values()))
        if self._num_runs - oldest.last > self._most_remembered:
            self._leaving = [(kept.record.mark(), kept.record) for kept in self._records.values()]
            self._records.clear()
        return False

    def _recorded(self, key: Hashable, name: Hashable, work: Callable[[], None]) -> _Kept | None:
        if name in self.failures:
            return None
        try:
            found = self._recorder.record(work)
        except Exception as error:  # whatever it is that cannot be recorded: done as it is, it says what is wrong with it, if anything is
            self._failed(name, error)
            return None
        kept = self._records[key] = _Kept(found, self._num_runs)
        return kept

    def _failed(self, name: Hashable, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if not self.failures:
            warnings.warn(
                f"work {name!r} cannot be recorded, and is started launch by launch at every step: {text}. Numbers are the same. This is "
                "said once; `failures` has all",
                RuntimeWarning,
                stacklevel=4,
            )
        if len(self.failures) < self._most_remembered:
            self.failures[name] = text


class WorkAsItIs:
    """Where a device records nothing."""

    is_paused = False

    def __init__(self) -> None:
        self.failures: dict[Hashable, str] = {}
        self.num_launched = 0

    def run(
        self,
        name: Hashable,
        tensors: Sequence[Tensor],
        work: Callable[[], None],
        written: Sequence[Tensor] = (),
    ) -> None:
        """``work()``."""
        work()
