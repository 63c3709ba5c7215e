"""How a job fails: one rank's failure as a value, which of several came first, and the error that the caller sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SETTLE_SECONDS = 0.2
"""How long to wait for other ranks' messages after a failure that explains itself."""
SETTLE_CONSEQUENCE_SECONDS = 2.0
"""The same after a failure that another rank's failure may have caused."""


@dataclass(frozen=True)
class Failure:
    """What one rank has to say of its end."""

    rank: int
    summary: str
    """One line: ``failed with ValueError: bad`` or ``was killed by signal 9 (SIGKILL)``."""
    traceback: str
    """Python's traceback from the caller's function on; empty if the process left none."""
    time: float
    """Of the host's monotonic clock, seconds; the same clock for all processes of a host."""
    is_consequence: bool
    """Whether it looks like the effect of another rank's failure: a lost connection, a time-out of a collective, an abort."""


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The failure to report: the earliest that is no consequence, else the earliest.

    A rank whose peer dies fails too, and its message may well arrive first; it must not hide the cause.
    """
    return min(failures, key=lambda failure: (failure.is_consequence, failure.time))


class WorkerError(RuntimeError):
    """A rank failed; the text carries its traceback and one line for every other rank."""

    def __init__(self, message: str, *, rank: int, traceback: str) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank that failed first."""
        self.traceback = traceback
        """That rank's traceback, or the stacks of its threads if it hung; empty if it left none."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """Ranks did not finish, or did not start, in time; the text carries their stacks."""


def worker_error(failures: Sequence[Failure], num_processes: int, returned: Sequence[int]) -> WorkerError:
    """The error of a job of ``num_processes`` in which ``failures`` arrived and the ranks ``returned`` had finished."""
    first = first_cause(failures)
    lines = [f"rank {first.rank} of {num_processes} {first.summary}"]
    if first.traceback:
        lines.extend(["", first.traceback.rstrip()])
    told = {failure.rank: failure.summary for failure in failures}
    others = [rank for rank in range(num_processes) if rank != first.rank]
    if others:
        lines.extend(["", "other ranks:"])
    for rank in others:
        if rank in told:
            lines.append(f"  rank {rank} {told[rank]}")
        elif rank in returned:
            lines.append(f"  rank {rank} had returned")
        else:
            lines.append(f"  rank {rank} was still running and was stopped")
    return WorkerError("\n".join(lines), rank=first.rank, traceback=first.traceback)
