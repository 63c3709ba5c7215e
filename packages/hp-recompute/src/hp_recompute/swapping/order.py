"""Which groups backward wants next.

[Note: learnt order] Backward mostly wants groups in the reverse order of forward, and with several micro-batches in flight in the order of a
schedule, which is the same in every step. So it is remembered, by their numbers within a step, which group was wanted after which,
and that one is fetched ahead the next time; where nothing is known, or there is no such group now, the one that ran before. Those that
are wanted behind it, before a forward begins, may follow ([Note: room] in :mod:`hp_recompute.swapping.room`). It is remembered, too, after
which groups forward went on with another one. A step ends when nobody wants anything any more. A wrong guess costs the memory of
groups and the time of copies, never a wrong number: what is wanted is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator

MOST = 100_000
"""Remembered at most; a program whose graphs are never freed has no steps."""


class Order:
    """Of the groups of a manager."""

    def __init__(self) -> None:
        self._after: dict[int, int] = {}
        self._last_of_backward: set[int] = set()
        """After which a group began before the next was wanted."""
        self._followed: set[int] = set()
        """After whose end a group began before one was wanted."""
        self._wanted: int | None = None
        self._ended: int | None = None
        self._has_begun = False
        """Whether a group has, since the last one was wanted."""
        self._num_begun = 0

    def new_step(self) -> None:
        """Numbers begin anew."""
        self._not_followed()
        self._wanted, self._num_begun = None, 0

    def begun(self) -> int:
        """The number of a group that begins."""
        if self._ended is not None and len(self._followed) < MOST:
            self._followed.add(self._ended)
        self._ended, self._has_begun = None, True
        self._num_begun = self._num_begun + 1
        return self._num_begun - 1

    def ended(self, ordinal: int) -> None:
        """A group has ended."""
        self._ended = ordinal

    def is_followed(self, ordinal: int) -> bool:
        """Whether another group began after its end, the last time, and backward did not."""
        return ordinal in self._followed

    def wanted(self, ordinal: int) -> bool:
        """Backward has come to a group; whether it is the first one since forward."""
        self._not_followed()
        is_first, self._has_begun = self._has_begun, False
        before, self._wanted = self._wanted, ordinal
        if before is not None and before != ordinal and (before in self._after or len(self._after) < MOST):
            self._after[before] = ordinal
            if is_first:
                self._last_of_backward.add(before)
            else:
                self._last_of_backward.discard(before)
        return is_first

    def _not_followed(self) -> None:
        if self._ended is not None:
            self._followed.discard(self._ended)
            self._ended = None

    def after(self, ordinal: int) -> int | None:
        """The one that was wanted after it the last time; None: not known."""
        return self._after.get(ordinal)

    def rest_of_backward(self, ordinal: int) -> Iterator[int]:
        """Those that were wanted after it the last time, before a forward began."""
        passed = {ordinal}
        while ordinal in self._after and ordinal not in self._last_of_backward:
            ordinal = self._after[ordinal]
            if ordinal in passed:
                return
            passed.add(ordinal)
            yield ordinal
