"""What the units of one model have in common while it runs. It hangs on the outermost unit, the root."""

from __future__ import annotations

import threading
import weakref

from hp_fsdp.backward_end import EndOfBackward, nothing, queue_end
from hp_fsdp.late_parameters import LateParameters
from hp_fsdp.order import Order
from hp_fsdp.peers import Peers
from hp_fsdp.reductions import Reductions
from hp_fsdp.states import ShardState
from hp_fsdp.streams import Streams, Task
from hp_fsdp.unit import Unit
from hp_fsdp.unit_names import name_units
from hp_fsdp.unit_parameters import UnitParameters
from hp_platform import _process
from hp_platform.group import ProcessGroup
from hp_platform.platform import Platform


class RootContext:
    """Passes and backwards of one root.

    [Note: passes] A pass is one call of the outermost module. What an earlier pass has gathered and no backward has
    re-sharded (its loss was dropped) may be older than the optimizer's last step, so a new pass gathers it again.

    [Note: looking ahead] When a unit begins, the one that followed it last time is gathered behind it, while it computes. So
    two units besides the root are whole at a time, not more.
    """

    def __init__(self, root: Unit, units: list[Unit]) -> None:
        self.platform: Platform = root.platform
        self.root = root
        self.units = units
        name_units(root, units)
        self._late = LateParameters(root)
        self.streams = Streams(root.platform, root.places.device)
        self.pass_number = 0
        self.in_backward = False
        self.is_last_backward = True
        self.end: weakref.ref[EndOfBackward] | None = None
        """Of the last backward: what is called at its end, while there is one."""
        self._ending = threading.RLock()
        """Held by who clears up behind a backward that has failed."""
        self._active: list[Unit] = []
        self._forward = Order[Unit]()
        self._backward = Order[Unit]()
        self._left: list[Unit] = []
        """Units in the order in which they ended forward."""
        self._ahead: set[UnitParameters] = set()
        """Gathered for somebody who has not come yet."""
        self._looked: dict[UnitParameters, int] = {}
        self.reductions = Reductions()
        self.reading: Task | None = None
        """The last gather of offloaded shards; see [Note: when the host may write]."""
        self._peers: dict[ProcessGroup, Peers] = {}
        self.number = max((other.number for other in _process.state.sharded_roots), default=0) + 1
        """Of the roots in this process, by age: all ranks end their reductions in this order."""
        _process.state.sharded_roots.add(self)

    # --- forward
    @property
    def is_followed(self) -> bool:
        """Whether another unit is expected to run after the one that ran last."""
        return self._forward.expects_more

    def enter(self, unit: Unit) -> None:
        """A call of ``unit`` begins."""
        if unit in self._active:
            # A call that never ended: it was left by an exception.
            self._active = self._active[: self._active.index(unit)]
        if not self._active:
            self._late.check()
            self.pass_number = self.pass_number + 1
            self._forward.begin()
            self._left = []
            self._reshard_ahead()
            self._close_rounds()
        self._active.append(unit)

    def gather_for_forward(self, unit: Unit) -> None:
        """Show the unit's whole parameters, as they are in the present pass, and gather ahead."""
        if unit.is_stale(self.pass_number):
            unit.reshard()
        unit.gathered_in_pass = self.pass_number
        if unit.state is ShardState.SHARDED:
            unit.launch_gather()
        following = self._forward.enter(unit)
        self._gather_ahead(unit.options.forward_prefetch, following)
        self._ahead.discard(unit)
        unit.show()
        for part in unit.parts:
            part.hide()  # shown by hand, they would not tell of a use outside of their forward

    def gather_on_demand(self, unit: UnitParameters) -> None:
        """Show a part of the root whose parameters are used outside of its module's forward."""
        if not self.in_backward and unit.is_stale(self.pass_number):
            unit.reshard()
        unit.show()
        unit.gathered_in_pass = self.pass_number
        self._ahead.discard(unit)

    def leave(self, unit: Unit) -> None:
        """The call ends."""
        self._left.append(unit)
        if unit in self._active:
            self._active = self._active[: self._active.index(unit)]
        if not self._active:
            self._close_rounds()
            self._reshard_ahead()
            self.wait_until_read()

    def give_up(self, unit: Unit, last_pass: int) -> None:
        """A call was left by an exception; ``last_pass`` is of when it began. No communication.

        What the outer calls have used stays: they may catch the exception and go on.
        """
        has_begun = unit in self._active or self.pass_number != last_pass
        if unit in self._active:
            self._active = self._active[: self._active.index(unit)]
            unit.entered = {}
            if self._active and self.pass_number not in (unit.hidden_in_pass, unit.used_outside_in_pass):
                unit.reshard()
        if self._active or not has_begun:
            return
        self._forward.forget()
        self._left = []
        self._ahead = set()
        for each in self.units:
            each.entered = {}
            if each.gathered_in_pass == self.pass_number:
                each.reshard()
        self.wait_until_read()

    @property
    def runs(self) -> bool:
        """Whether forward or backward is under way."""
        return bool(self._active) or (self.in_backward and not self._is_dead())

    def wait_until_read(self) -> None:
        """The host waits until no copy reads offloaded shards."""
        if self.reading is not None:
            self.reading.synchronize()
            self.reading = None

    def peers_of(self, unit: UnitParameters) -> Peers | None:
        """Whose memory the unit's gathers and reductions may go through; None: they are collectives.

        The first time all ranks of the unit's shard group call. See :mod:`hp_fsdp.peers`.
        """
        if not unit.copies_between_peers:
            return None
        places = unit.places
        found = self._peers.get(places.shard_group)
        if found is None:
            same = [other for other in self.units if other.places.shard_group is places.shard_group]
            largest = max(other.longest_row for other in same)
            found = Peers(self.platform, places.shard_group, places.device, largest)
            self._peers[places.shard_group] = found
        return found

    def knows_reach_of(self, group: ProcessGroup) -> bool | None:
        """Whether the ranks of a shard group reach each other's memory; None before the first gather."""
        found = self._peers.get(group)
        return None if found is None else found.reach_each_other

    def _close_rounds(self) -> None:
        """Units of several modules of which only some were called, or that an exception left."""
        for unit in self.units:
            if unit.entered:
                unit.entered = {}
                unit.reshard()

    def look_at_shards(self, unit: UnitParameters) -> None:
        """Once per pass: the user may have changed what lies below the parameters."""
        runs = self.runs
        if not runs or self._looked.get(unit) != self.pass_number:
            unit.refresh()
            if runs:
                self._looked[unit] = self.pass_number

    def _gather_ahead(self, told: list[Unit] | None, following: Unit | None) -> None:
        for unit in told if told is not None else [] if following is None else [following]:
            if unit.is_stale(self.pass_number):
                unit.reshard()
            if unit.state is ShardState.SHARDED:
                unit.launch_gather()
                unit.gathered_in_pass = self.pass_number
                self._ahead.add(unit)

    def _reshard_ahead(self) -> None:
        for unit in self.units:
            if unit in self._ahead:
                unit.reshard()
        self._ahead = set()

    # --- backward
    def begin_backward(self) -> None:
        """A backward has reached one of the units; its end will be noticed."""
        if self._is_dead():
            self._bury()
        if not self.in_backward:
            self.end = queue_end(self)
            self.in_backward = True
            self.reductions.begin_backward()
            for unit in self.units:
                if unit.hidden_in_pass is not None or unit.used_outside_in_pass is not None:
                    unit.unshard()  # nobody may tell when it is needed
            expected = list(dict.fromkeys(unit for unit in reversed(self._left) if unit.is_noticed))
            self._backward.begin(expected)

    def gather_for_backward(self, unit: Unit) -> None:
        """Show the unit's whole parameters, and gather ahead."""
        if unit.state is ShardState.SHARDED:
            unit.launch_gather()
        seen = self._backward.seen
        if not seen or seen[-1] is not unit:  # an output more of the same call is no news
            following = self._backward.enter(unit)
            self._gather_ahead(unit.options.backward_prefetch, following)
        self._ahead.discard(unit)
        unit.show()

    def drain(self) -> None:
        """Finish all reductions: gradients of shards are there for what the computation does next."""
        self.reductions.finish()
        self.wait_until_read()
        self.reductions.deliver()

    def end_backward(self) -> None:
        """Settle and re-shard everything, and unless more backwards follow wait for the gradients of shards."""
        # The order is that of the module tree on all ranks, so that they launch the same collectives.
        self.in_backward = False
        try:
            for unit in reversed(self.units):
                unit.finish_backward()
        except BaseException:
            # It has failed as any other: see [Note: backwards that fail].
            self.in_backward, self.end = True, None
            self._give_back()
            raise
        self.reductions.begin_backward()
        self._reshard_ahead()
        if self.is_last_backward:
            with self.platform.no_grad():
                self.drain()

    def forget_dead_backward(self) -> None:
        """After a backward that ended with an exception, which calls nobody back, start anew."""
        if not self.in_backward:
            return
        if self._is_dead():
            self._bury()
            return
        try:
            self.platform.queue_backward_callback(nothing)
        except RuntimeError:  # we are outside of a backward: the one that has begun is dead
            self._bury()

    def _is_dead(self) -> bool:
        """Whether the framework has dropped the backward that is said to run, and with it what was to be called at its end."""
        return self.in_backward and (self.end is None or self.end() is None)

    def end_is_gone(self, end: weakref.ref[EndOfBackward]) -> None:
        """Nobody will be called back at the end of a backward. See [Note: backwards that fail] in :mod:`hp_fsdp.backward_end`."""
        with self._ending:
            if self.in_backward and self.end is end:
                self._give_back()

    def _give_back(self) -> None:
        for unit in self.units:
            unit.give_back()

    def _bury(self) -> None:
        with self._ending:
            self.in_backward = False
        self.reductions.drop_backward()  # the user may have cleared gradients since
        with self.platform.no_grad():
            self.drain()
        for unit in self.units:
            unit.forget_backward()
