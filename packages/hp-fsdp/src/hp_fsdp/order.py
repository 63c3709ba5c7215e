"""In which order units run: recorded in one pass, replayed in the next to gather ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

U = TypeVar("U")


class Order(Generic[U]):
    """Whoever runs as last time is told who comes next. From the first difference on, nobody is, until the next round.

    All ranks run their units in the same order, so they look ahead alike, and launch the same collectives.
    """

    def __init__(self) -> None:
        self._known: list[U] = []
        self.seen: list[U] = []
        """Who has run in this round."""
        self._is_as_known = True

    @property
    def expects_more(self) -> bool:
        """Whether somebody comes after the one that has run last."""
        return self._is_as_known and len(self.seen) < len(self._known)

    def begin(self, guess: Sequence[U] = ()) -> None:
        """A new round; ``guess`` is what to expect in the very first."""
        if self.seen:
            self._known = self.seen
        elif not self._known:
            self._known = list(guess)
        self.seen = []
        self._is_as_known = True

    def forget(self) -> None:
        """The round was left before its end: the one before it is what to expect."""
        self.seen = []

    def enter(self, unit: U) -> U | None:
        """``unit`` runs; the one that is expected after it."""
        at, known = len(self.seen), self._known
        self.seen.append(unit)
        self._is_as_known = self._is_as_known and at < len(known) and known[at] is unit
        return known[at + 1] if self._is_as_known and at + 1 < len(known) else None
