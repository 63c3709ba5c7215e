"""What the units of one model have in common while it runs. It hangs on the outermost unit, the root."""

from __future__ import annotations

from hp_fsdp.unit import ShardState, Unit, units_in
from hp_platform.platform import Platform


class RootContext:
    """Passes and backwards of one root.

    [Note: passes] A pass is one call of the outermost module. What an earlier pass has gathered and no backward has
    re-sharded (its loss was dropped) may be older than the optimizer's last step, so a new pass gathers it again.
    """

    def __init__(self, root: Unit, units: list[Unit]) -> None:
        self.platform: Platform = root.platform
        self.root = root
        self.units = units
        self.pass_number = 0
        self.in_backward = False
        self._active: list[Unit] = []

    # --- forward
    def enter(self, unit: Unit) -> None:
        """A call of ``unit`` begins."""
        if unit in self._active:
            # A call that never ended: it was left by an exception.
            self._active = self._active[: self._active.index(unit)]
        if not self._active:
            self.pass_number = self.pass_number + 1
            self.forget_dead_backward()
        self._active.append(unit)

    def leave(self, unit: Unit) -> None:
        """The call ends."""
        if unit in self._active:
            self._active = self._active[: self._active.index(unit)]

    # --- backward
    def begin_backward(self) -> None:
        """A backward has reached one of the units; its end will be noticed."""
        if not self.in_backward:
            self.platform.queue_backward_callback(self._end_backward)
            self.in_backward = True

    def _end_backward(self) -> None:
        # The order is that of the module tree on all ranks, so that they launch the same collectives.
        self.in_backward = False
        for unit in reversed(self.units):
            unit.finish_backward()

    def forget_dead_backward(self) -> None:
        """After a backward that ended with an exception, which calls nobody back, start anew."""
        if not self.in_backward:
            return
        try:
            self.platform.queue_backward_callback(_nothing)
        except RuntimeError:  # we are outside of a backward: the one that has begun is dead
            self.in_backward = False
            for unit in self.units:
                unit.open_uses = []
                unit.has_news = False
                unit.reshard()


def _nothing() -> None:
    """Queued to ask whether a backward is running."""


def context_of(unit: Unit) -> RootContext:
    """The context of a unit that is about to run. A unit that runs first, outside of any other, becomes a root.

    RuntimeError if a unit inside of it is in the middle of a backward.
    """
    if unit.context is not None:
        return unit.context
    units = list(units_in(unit.platform, unit.module))
    for inner in units:
        if inner.context is not None:
            inner.context.forget_dead_backward()
            if inner.context.in_backward:
                raise RuntimeError(
                    f"{unit.label} was called while {inner.label}, which is inside of it, runs backward: call the outer "
                    "module first"
                )
    context = RootContext(unit, units)
    for each in units:
        # Passes of a root that a unit was before are counted by other numbers.
        each.uses = None
        each.reshard()
        each.context = context
    return context


def reshards_after_forward(unit: Unit) -> bool:
    """Whether the unit frees its whole parameters after forward. The root keeps them: backward begins with it."""
    if unit.reshard_as_told is not None:
        return unit.reshard_as_told
    assert unit.context is not None
    return unit.reshard_by_default and unit.context.root is not unit


def refresh(unit: Unit, context: RootContext) -> None:
    """Show the unit's whole parameters, as they are in the present pass."""
    stale = unit.gathered_in_pass is not None and unit.gathered_in_pass != context.pass_number
    if unit.state is not ShardState.SHARDED and stale:
        unit.gather()
    unit.show()
    unit.gathered_in_pass = context.pass_number
