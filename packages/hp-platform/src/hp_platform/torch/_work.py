"""Work handles of launches that are more than one launch of torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Then:
    """A launch whose result still has to be put in its place."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        """Wait, then put the result in its place (once)."""
        self._work.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None

    def is_completed(self) -> bool:
        """Whether waiting would return at once."""
        return self._work.is_completed()


class All:
    """Several launches as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """Whether waiting would return at once."""
        return all(work.is_completed() for work in self._works)


def after(work: Any, finish: Callable[[], None] | None) -> Any:
    """``finish`` when the launch is done: now, or (a work handle) when it is waited for."""
    if finish is None:
        return work
    if work is None:
        finish()
        return None
    return Then(work, finish)
