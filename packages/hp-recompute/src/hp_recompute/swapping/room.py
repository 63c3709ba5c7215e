"""How much there may be on a device, so that copies may take their time.

[Note: room] What leaves a device need not have left, and what comes back may come early, as long as nothing needs the memory. What needs it is
known from the device's own count of bytes, and from the step before: so much as would be there if every group left as early as
it may (:class:`hp_recompute.SwapManager` says when that is), at most, may be there while forward runs. In backward it is what was
there when backward began: what the layers behind have freed, less the gradients that they have made. Both are counted without asking the
device, in the order of the program, in which memory is given out and taken back. In the first step everything leaves as early
as it may, and comes when it must.
"""

from __future__ import annotations

from collections.abc import Callable

from hp_recompute.swapping.order import MOST


class Room:
    """Of one device."""

    def __init__(self, in_use: Callable[[], int]) -> None:
        """``in_use()``: bytes there now."""
        self._in_use = in_use
        self._at_start = in_use()
        self._bound: int | None = None
        """Bytes beyond those at the start of the step that may be there in forward; None: nothing is known."""
        self._most = 0
        """Of this step, without what would have left before."""
        self._at_turn = 0
        self._at_end: tuple[int, int] | None = None
        self._between: dict[int, int] = {}
        """Bytes that were made after a group and before the next one."""

    def new_step(self) -> None:
        """What was seen is what is expected."""
        if self._most > 0:
            self._bound = self._most
        self._at_start, self._most, self._at_end = self._in_use(), 0, None

    @property
    def is_known(self) -> bool:
        """Whether a step was seen."""
        return self._bound is not None

    def begun(self, late_nbytes: int) -> None:
        """A group begins; ``late_nbytes`` would have left before."""
        early = self._look(late_nbytes)
        if self._at_end is not None:
            ordinal, before = self._at_end
            if ordinal in self._between or len(self._between) < MOST:
                self._between[ordinal] = max(early - before, 0)
            self._at_end = None

    def ended(self, ordinal: int, late_nbytes: int) -> None:
        """A group has ended."""
        self._at_end = (ordinal, self._look(late_nbytes))

    def _look(self, late_nbytes: int) -> int:
        early = self._in_use() - self._at_start - late_nbytes
        self._most = max(self._most, early)
        return early

    def behind(self, ordinal: int) -> int:
        """Bytes that will be made between a group and the next one."""
        return self._between.get(ordinal, 0)

    def lacks(self, nbytes: int) -> bool:
        """Whether forward must let something go before it makes so many bytes."""
        return self._bound is None or self._in_use() - self._at_start + nbytes > self._bound

    def turned(self) -> None:
        """Backward begins."""
        self._at_turn, self._at_end = self._in_use(), None

    def takes(self, nbytes: int) -> bool:
        """Whether backward may fetch so many bytes early."""
        return self._in_use() + nbytes <= self._at_turn
