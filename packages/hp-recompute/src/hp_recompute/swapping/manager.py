"""When groups travel.

[Note: two groups on the device] When a group begins, those that ended before it start for the host, and when it ends, the computation
waits for their copies, and what they have left is free. So beside the one that runs, one other is on the device, and the last one,
which backward wants first, never leaves. In backward, the first thing that is wanted of a group brings the group, and lets
the one start that will be wanted next ([Note: learnt order] in :mod:`hp_recompute.swapping.order`).

[Note: copies take their time] Where there is more on the device anyway, as of layers that keep what they save, waiting at that place would
be for nothing: from the second step on, forward lets go of what leaves, portion by portion, when it needs the memory, and backward
fetches further groups as soon as it has freed as much ([Note: room] in :mod:`hp_recompute.swapping.room`). For that the manager
must see the layers that keep all, too: they are groups that move nothing (in a chain, or with a policy that says so).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hp_platform import _process
from hp_platform.platform import get_platform
from hp_recompute.swapping.chain import Link
from hp_recompute.swapping.copies import Copies, MakeCopies, copies_on_streams
from hp_recompute.swapping.group import BY_HAND, Group
from hp_recompute.swapping.leaving import Leaving
from hp_recompute.swapping.named import NamedGroups
from hp_recompute.swapping.order import Order
from hp_recompute.swapping.pinned import HostPool
from hp_recompute.swapping.room import Room
from hp_recompute.swapping.storage import SwappedStorage


class _OneOfTheProcess(type):
    """``SwapManager()`` is the one that :func:`hp_recompute.swap` uses, whoever asks and how often."""

    def __call__(cls, *, copies: MakeCopies | None = None) -> Any:
        if copies is not None:
            return super().__call__(copies=copies)
        if _process.state.swap_manager is None:
            _process.state.swap_manager = super().__call__()
        return _process.state.swap_manager


class SwapManager(NamedGroups, metaclass=_OneOfTheProcess):
    """Moves what calls of :func:`hp_recompute.swap` save to the host and back.

    ``SwapManager()`` is always the process' one, which moves all such calls and wrapped modules. With ``copies`` it is one of its
    own, of which calls know nothing: how a device is copied from and to, ``(platform, device)``, None for one from which nothing is.
    """

    def __init__(self, *, copies: MakeCopies = copies_on_streams) -> None:
        self.platform = get_platform()
        self._make_copies = copies
        self._copies: dict[str, Copies | None] = {}
        self._pools: dict[str, HostPool] = {}
        self._swaps_nothing = copies is copies_on_streams and self.platform.device_types() == ("cpu",)
        self._rooms: dict[str, Room] = {}
        self._order = Order()
        self._live: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
        self._outputs: weakref.WeakValueDictionary[int, SwappedStorage] = weakref.WeakValueDictionary()
        """Memories of groups' outputs that the groups have saved, too."""
        self._open: list[Group] = []
        """That are under way, innermost last."""
        self._ended: list[Group] = []
        """That have not started for the host."""
        self._leaving = Leaving(self._rooms)
        self._ahead: list[Group] = []
        """That were fetched before it was their turn."""
        self._largest = 0
        """Bytes of one memory that was saved, at most: the next one may be as large."""
        self.num_not_fetched = 0
        """How often backward came to a group that was not fetched ahead, and waited for all of its copy: in every step for none, if all
        steps are alike, but for the first group of a backward that nothing was before."""
        self._kept = {}
        self._next_name: str | None = None
        self._num_links = 0
        self._last_wanted: Callable[[], Group | None] = _nobody
        self._to_release: list[weakref.ref[Group]] = []

    # --- devices
    def copies_of(self, device: str) -> Copies | None:
        """None for a device without a memory of its own."""
        if device not in self._copies:
            copies = self._copies[device] = self._make_copies(self.platform, device)
            if copies is not None:
                self._rooms[device] = Room(lambda: self._in_use(device, copies))
        return self._copies[device]

    def _in_use(self, device: str, copies: Copies) -> int:
        counted = copies.in_use()
        if counted is not None:
            return counted
        return sum(group.device_nbytes(device) for group in list(self._live.values()))

    def pool_of(self, device: str) -> HostPool:
        """The host's memory for copies of a device."""
        if device not in self._pools:
            copies = self.copies_of(device)
            if copies is None:
                raise AssertionError(f"nothing is copied from {device}")
            exact = not self.platform.supports("write_into_view", device)
            self._pools[device] = HostPool(copies.empty_on_host, exact=exact)
        return self._pools[device]

    @property
    def host_nbytes(self) -> int:
        """Bytes of the host's memory that are taken: in use, or kept for the next step."""
        return sum(pool.nbytes for pool in self._pools.values())

    @property
    def device_nbytes(self) -> int:
        """Bytes on devices, in this moment, of what groups have saved and may move."""
        return sum(group.nbytes[0] for group in list(self._live.values()))

    def free_host_memory(self) -> None:
        """Give back what is kept for the next step."""
        for pool in self._pools.values():
            pool.clear()

    # --- forward
    @property
    def is_idle(self) -> bool:
        """Whether a function that is called now runs as it is: nothing leaves this process' devices, nothing is recorded, or a
        checkpoint will run it again, and keeps nothing of it.
        """
        return (
            self._swaps_nothing or not self.platform.is_grad_enabled() or bool(_process.checkpoint_runs.get())
        )

    @property
    def current(self) -> Group | None:
        """The group that is saved to now."""
        return self._open[-1] if self._open else None

    def begin(self, name: str, *, fused: bool, only_chosen: bool = False, link: Link | None = None) -> Group:
        """A group that a function saves to from now on."""
        self._ended = [group for group in self._ended if group.is_alive]
        if not self._open and not any(group.is_alive for group in self._live.values()):
            self._new_step()
        if self._to_release and not self.platform.is_in_backward():
            self._end_of_backward()  # an exception has left it: nobody called
        self._give_back_ahead()
        for device, room in self._rooms.items():
            room.begun(self._leaving.late_nbytes(device))
        for group in self._ended:
            self._leaving.launch(group)
        self._ended.clear()
        name = link.name if link is not None else self._next_name or name
        group = Group(self, name, self._order.begun(), fused=fused, only_chosen=only_chosen, link=link)
        self._live[group.ordinal] = group
        self._open.append(group)
        self._leaving.let_go(self._largest)
        return group

    def taken_over(self, key: int) -> SwappedStorage | None:
        """The memory of an output of a group; see [Note: outputs that two groups save] in :mod:`hp_recompute.swapping.group`."""
        storage = self._outputs.pop(key, None)
        return storage if storage is not None and storage.group.give(storage) else None

    def pace(self, group: Group, on_wanted: Callable[[], None]) -> None:
        """Let the caller say when to wait for a group that leaves, and in ``on_wanted()``, when backward comes to it, what is fetched then."""
        group.on_wanted = on_wanted

    def made(self, nbytes: int) -> None:
        """A group saves a memory of so many bytes."""
        self._largest = max(self._largest, nbytes)
        self._leaving.let_go(self._largest)

    def end(self, group: Group, outputs: Any) -> None:
        """The function has returned ``outputs``, or (None) failed."""
        self._open = [each for each in self._open if each is not group]
        group.protect(outputs)
        for storage in group.protected():
            self._outputs[storage.key] = storage
        for device, room in self._rooms.items():
            room.ended(group.ordinal, self._leaving.late_nbytes(device))
        has_time = (
            outputs is not None
            and self._order.is_followed(group.ordinal)
            and all(room.is_known for room in self._rooms.values())
        )
        self._leaving.passed(group.ordinal)
        if has_time:
            behind = max((room.behind(group.ordinal) for room in self._rooms.values()), default=0)
            self._leaving.let_go(behind)
        else:
            self._leaving.wait_for_late()
        self._order.ended(group.ordinal)
        if group.link is None or group.link.after is not None:
            self._ended.append(group)

    def _new_step(self) -> None:
        self._leaving.wait_for_all()
        self._order.new_step()
        for room in self._rooms.values():
            room.new_step()

    # --- backward
    def wanted(self, group: Group) -> None:
        """Backward wants something of ``group``."""
        if group.ordinal == BY_HAND or self._last_wanted() is group:
            return
        self._last_wanted = weakref.ref(group)
        if any(each is group for each in self._ended):
            self._ended = [each for each in self._ended if each is not group]
            group.has_stayed()
        if self._order.wanted(group.ordinal):
            self._leaving.wait_for_unpaced(group)
            for room in self._rooms.values():
                room.turned()
        self._leaving.stays(group)
        if not group.is_wanted and self.platform.is_in_backward():
            group.is_wanted = True
            self._to_release.append(weakref.ref(group))
            self.platform.queue_backward_callback(self._end_of_backward)
        if group.is_on_host:
            self.num_not_fetched = self.num_not_fetched + 1
            group.launch_load()
        if group.on_wanted is not None:
            group.on_wanted()
        else:
            self._fetch_next(group)

    def _fetch_next(self, group: Group) -> None:
        """What is wanted after it, and see [Note: copies take their time]."""
        there = {
            number
            for number, each in list(self._live.items())
            if each is not group and not each.is_wanted and each.is_on_host
        }
        following = self._order.after(group.ordinal)
        if following is None or following not in self._live:
            following = self._before(group, there)
        if following in there:
            self._live[following].launch_load()
        for number in self._order.rest_of_backward(group.ordinal):
            each = self._live.get(number)
            if each is None or each.is_wanted or not each.is_on_host:
                continue
            if not all(self._rooms[device].takes(nbytes) for device, nbytes in each.host_nbytes().items()):
                return
            self.fetch_ahead(each)

    def fetch_ahead(self, group: Group) -> None:
        """Before backward comes to it; if it does not, it is given back."""
        group.launch_load()
        self._ahead.append(group)

    def _give_back_ahead(self) -> None:
        """What was fetched for a backward that did not come: a forward begins."""
        for each in self._ahead:
            if not each.is_wanted:
                each.wait_load()
                each.release()
        self._ahead.clear()

    def _before(self, group: Group, there: set[int]) -> int | None:
        """The one that ran before ``group``, or (in a chain) that of the layer before."""
        before = {number for number in there if number < group.ordinal}
        if group.link is not None and group.link.before is not None:
            name = group.link.before.name
            before = {number for number in before if self._live[number].name == name}
        return max(before, default=None)

    def _end_of_backward(self) -> None:
        self._last_wanted = _nobody
        groups, self._to_release = self._to_release, []
        for group in (ref() for ref in groups):
            if group is not None:
                group.is_wanted = False
                group.release()


def _nobody() -> None:
    """No group was wanted."""


def default_manager() -> SwapManager:
    """The one of the process."""
    manager: SwapManager | None = _process.state.swap_manager
    return SwapManager() if manager is None else manager


@contextmanager
def use_manager(manager: SwapManager) -> Iterator[SwapManager]:
    """Inside, ``manager`` is the one of the process."""
    before, _process.state.swap_manager = _process.state.swap_manager, manager
    try:
        yield manager
    finally:
        _process.state.swap_manager = before
