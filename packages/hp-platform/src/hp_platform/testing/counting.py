"""Counting the collectives of a piece of code: an accidental all-reduce fails a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hp_platform import collectives
from hp_platform.recording import CollectiveRecord, record_collectives


@dataclass(frozen=True)
class Counted:
    """What this rank has started inside of :func:`count_collectives`."""

    record: CollectiveRecord
    """Every launch with kind, bytes and group."""

    @property
    def counts(self) -> dict[str, int]:
        """Kind -> number of launches; kinds that did not occur are absent."""
        return self.record.counts()

    def nbytes(self, kind: str | None = None) -> int:
        """Bytes of all launches, or of those of one kind."""
        return self.record.nbytes(kind)

    def assert_counts(self, **expected: int) -> None:
        """The launches are exactly these: ``assert_counts(all_gather=2, reduce_scatter=1)``. A kind that is not named is 0.

        AssertionError with both counts and every launch; ValueError for a name that is no collective.
        """
        unknown = [kind for kind in expected if not callable(getattr(collectives, kind, None))]
        if unknown:
            raise ValueError(
                f"no collective is called {', '.join(unknown)}: use the names of hp_platform.collectives"
            )
        wanted = {kind: number for kind, number in expected.items() if number}
        if self.counts != wanted:
            raise AssertionError(
                f"expected {_shown(wanted)}, but this rank started {_shown(self.counts)}:\n{self.record}"
            )


@contextmanager
def count_collectives() -> Iterator[Counted]:
    """Count every collective that this rank starts inside, also during backward. Groups of one rank start none.

    Communication: none.
    """
    with record_collectives() as record:
        yield Counted(record)


def _shown(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items())) or "no collective"
