"""What a benchmark case is: two sides that do the same work, and what is measured of them."""

import enum
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One measurement: the value in the case's unit, and the peak memory while it ran (None: not known)."""

    value: float
    peak_bytes: int | None = None


Measure = Callable[[], Sample]
# Entering builds (model, buffers, process group), the value measures, leaving frees, so that the other side finds the
# machine as this one found it.
Side = Callable[[], AbstractContextManager[Measure]]


class Better(enum.Enum):
    """Which values win: a time is better when lower, a rate when higher."""

    LOWER = "lower"
    HIGHER = "higher"


@dataclass(frozen=True)
class Case:
    """A comparison of ours with a peer that does the same job.

    `goal` is a bound on the ratio ours / peer: at most it where lower is better, at least it where higher is.
    """

    name: str
    summary: str
    ours: Side
    peer: Side
    peer_name: str
    unit: str
    better: Better
    goal: float

    def reaches_goal(self, ratio: float) -> bool:
        """Whether a ratio ours / peer keeps the bound."""
        return ratio <= self.goal if self.better is Better.LOWER else ratio >= self.goal

    def describe_goal(self) -> str:
        """The bound as text, for example `<= 1.05`."""
        return f"{'<=' if self.better is Better.LOWER else '>='} {self.goal:g}"
