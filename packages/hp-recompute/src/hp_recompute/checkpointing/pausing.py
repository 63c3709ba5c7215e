"""What watches the runs of a region looks away for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Pausing:
    """Whether operations count now, for one who watches them in both runs."""

    def __init__(self) -> None:
        self.is_paused = False
        self.is_interrupted = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside does not run twice, or is the checkpoint's own work."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """A second run inside of the first, which does not see it."""
        before, self.is_interrupted = self.is_interrupted, True
        try:
            yield
        finally:
            self.is_interrupted = before
