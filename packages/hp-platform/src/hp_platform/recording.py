"""Counting communication: every collective that is started adds itself to the records that are open.

An accidental all-reduce costs time and shows in no value; with a record it fails a test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hp_platform import _process
from hp_platform.group import ProcessGroup


@dataclass(frozen=True)
class Launch:
    """One start of a collective on this rank. A coalesced launch of many tensors is one."""

    kind: str
    """The function's name in :mod:`hp_platform.collectives`: ``all_gather``, ``reduce_scatter``, ``send`` ..."""
    nbytes: int
    """Bytes of this rank's larger side: of the output for gathers, of the input for everything else."""
    group: ProcessGroup
    num_tensors: int = 1


@dataclass
class CollectiveRecord:
    """What was started while the record was open, in order."""

    launches: list[Launch] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Kind -> number of launches; kinds that did not occur are absent."""
        return dict(Counter(launch.kind for launch in self.launches))

    def nbytes(self, kind: str | None = None) -> int:
        """Bytes of all launches, or of one kind (see :attr:`Launch.nbytes`)."""
        return sum(launch.nbytes for launch in self.launches if kind is None or launch.kind == kind)

    def __str__(self) -> str:
        lines = [
            f"{x.kind:20s} {x.nbytes:>12,d} bytes  {x.num_tensors} tensor(s)  {x.group.describe()}"
            for x in self.launches
        ]
        return "\n".join(lines) or "no communication"


@contextmanager
def record_collectives() -> Iterator[CollectiveRecord]:
    """Collect every collective that this rank starts inside, also during backward; size-1 groups start none. Records nest.

    Communication: none. Example::

        with record_collectives() as record:
            loss.backward()
        assert record.counts() == {"reduce_scatter": 3}
    """
    record = CollectiveRecord()
    with _process.open_recorders.adding(record):
        yield record


def note(launch: Launch) -> None:
    """Add a launch to all open records."""
    for record in _process.open_recorders.records:
        record.launches.append(launch)
