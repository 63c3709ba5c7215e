"""The reductions of a model that are under way."""

from __future__ import annotations

from collections import deque

from hp_fsdp.reduce import Reduction
from hp_fsdp.summation import Summation

MAX_REDUCTIONS = 2
"""How many are under way at most. With one, the next unit would wait for the buffer of the one before (measured: +6 % of a step)."""


class Reductions:
    """In the order of their launches. Gradients of offloaded shards are delivered at the end of all: the host waits for them."""

    def __init__(self) -> None:
        self._under_way: deque[Reduction | Summation] = deque()
        self._of_backward: list[Reduction | Summation] = []
        """Begun by the running backward."""
        self._landing: list[Reduction | Summation] = []
        """Whose gradients are on their way to the host, or there."""

    def begin_backward(self) -> None:
        """What was launched so far is not the running backward's."""
        self._of_backward = []

    def launch(self, reduction: Reduction | Summation) -> None:
        """Begin one; if too many are under way, the first of them must be over before its buffers are used again."""
        while len(self._under_way) >= MAX_REDUCTIONS:
            self._finish_first()
        self._under_way.append(reduction)
        self._of_backward.append(reduction)
        reduction.launch()

    def finish(self) -> None:
        """Gradients of shards on the device are there for what the computation does next."""
        while self._under_way:
            self._finish_first()

    def deliver(self) -> None:
        """Gradients of shards on the host are there, after :meth:`finish`."""
        landing, self._landing = self._landing, []
        for reduction in landing:
            reduction.deliver()

    def drop_backward(self) -> None:
        """What the running backward has launched is not wanted any more; :meth:`finish` only waits for it."""
        for reduction in self._of_backward:
            reduction.drop()

    def _finish_first(self) -> None:
        reduction = self._under_way.popleft()
        reduction.finish()
        if reduction.target.host is not None:
            self._landing.append(reduction)
