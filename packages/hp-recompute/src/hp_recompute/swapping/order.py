"""Which group backward wants next.

[Note: learnt order] Backward mostly wants groups in the reverse order of forward, and with several micro-batches in flight in the order of a
schedule, which is the same in every step. So it is remembered, by their numbers within a step, which group was wanted after which,
and that one is fetched ahead the next time; where nothing is known, or there is no such group now, the one that ran before. A step
ends when nobody wants anything any more. A wrong guess costs the memory of a group and the time of a copy, never a wrong number:
what is wanted is waited for.
"""

from __future__ import annotations

_MOST = 100_000
"""Remembered at most; a program whose graphs are never freed has no steps."""


class Order:
    """Of the groups of a manager."""

    def __init__(self) -> None:
        self._after: dict[int, int] = {}
        self._wanted: int | None = None
        self._num_begun = 0

    def new_step(self) -> None:
        """Numbers begin anew."""
        self._wanted, self._num_begun = None, 0

    def begun(self) -> int:
        """The number of a group that begins."""
        self._num_begun = self._num_begun + 1
        return self._num_begun - 1

    def wanted(self, ordinal: int) -> None:
        """Backward has come to a group."""
        before, self._wanted = self._wanted, ordinal
        if before is not None and before != ordinal and (before in self._after or len(self._after) < _MOST):
            self._after[before] = ordinal

    def after(self, ordinal: int) -> int | None:
        """The one that was wanted after it the last time; None: not known."""
        return self._after.get(ordinal)
