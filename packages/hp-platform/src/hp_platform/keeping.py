"""Results of collectives that a first run of a program keeps and a second takes, instead of communicating again.

[Note: keepers] A keeper is asked at every launch that gives a result of its own, in the order of the program, by the thread that launches.
In a first run it keeps the result, in a second it gives the one with the same number, and nothing is launched. Keepers nest:
the outermost that gives decides, and all others count. What fills memory of the caller's (``out``) is launched both times, and so
is what a runtime launches on its own account, which need not be the same in both runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

from hp_platform import _process
from hp_platform.recording import Launch

T = TypeVar("T")


class Place(Protocol):
    """Where a keeper keeps one result."""

    def fill(self, result: Any) -> None:
        """When it is there."""
        ...

    def expect(self, wait: Callable[[], Any]) -> None:
        """It is under way: ``wait()``, while somebody else holds what it belongs to (a bound method), leads to :meth:`fill`."""
        ...


class Keeper(Protocol):
    """Of one run."""

    gives: bool
    """Whether this is a second run."""

    def keep(self, launch: Launch) -> Place:
        """In a first run: a place for the launch's result."""
        ...

    def take(self, launch: Launch) -> tuple[Any] | None:
        """In a second run: the result of the launch with the same number; None: there is none, it must be launched."""
        ...

    def quiet(self) -> AbstractContextManager[Any]:
        """Around what happens in one run only."""
        ...


@contextmanager
def entered(keepers: Sequence[Keeper]) -> Iterator[None]:
    """These are asked inside, innermost last, and no others."""
    token = _process.collective_keepers.set(tuple(keepers))
    try:
        yield
    finally:
        _process.collective_keepers.reset(token)


def present() -> tuple[Keeper, ...]:
    """Those that are asked now, innermost last."""
    return _process.collective_keepers.get()


def unkept(function: Callable[[], T]) -> T:
    """``function()``, whose collectives no keeper is asked about: a runtime's own."""
    if not _process.collective_keepers.get():
        return function()
    with entered(()):
        return function()


class KeptLaunch:
    """One launch that keepers are asked about."""

    def __init__(self, keepers: Sequence[Keeper], launch: Launch) -> None:
        self._keepers = keepers
        self._launch = launch
        self._places: list[Place] = []

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """See :meth:`Keeper.quiet`."""
        with ExitStack() as stack:
            for keeper in self._keepers:
                stack.enter_context(keeper.quiet())
            yield

    def taken(self) -> tuple[Any] | None:
        """The result, if one of the keepers gives it."""
        found: tuple[Any] | None = None
        for keeper in self._keepers:
            if keeper.gives:
                own = keeper.take(self._launch)
                found = own if found is None else found
            else:
                self._places.append(keeper.keep(self._launch))
        if found is not None:
            for place in self._places:
                place.fill(found[0])
        return found

    def noting(self, finish: Callable[[], T]) -> Callable[[], T]:
        """``finish``, after which the keepers have the result."""

        def noted() -> T:
            result = finish()
            with self.quiet():
                for place in self._places:
                    place.fill(result)
            return result

        return noted

    def expect(self, wait: Callable[[], Any]) -> None:
        """The result comes when this is called."""
        for place in self._places:
            place.expect(wait)
