"""On a rank: how long the parts of a training step take on the GPU, by marks between them.

A profiler costs the host time, so that a step which the host bounds is another one under it. Marks are events on the stream of
the computation: some forty a step, which nothing waits for before the last step has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

BEGIN, BACKWARD, GRADIENTS, END = "begin", "backward", "gradients", "end"
"""Marks of a step: before its first operation; between the loss and backward; when gradients may be read; behind the optimizer."""


@dataclass(frozen=True)
class Segments:
    """Milliseconds, the medians over steps (of blocks: over blocks and steps)."""

    start: float
    """Until the first block begins: the embedding, and what is gathered before."""
    forward: float
    """From one block to the next."""
    loss: float
    """The last block, the head and the loss."""
    first_gradients: float
    """Backward of these."""
    backward: float
    """From the end of one block's backward to that of the next."""
    finish: float
    """From the first block's backward to the gradients: that of the embedding, and what is reduced after it."""
    optimizer: float
    step: float

    def values(self) -> tuple[float, ...]:
        """In the order of :data:`COLUMNS`."""
        return tuple(asdict(self).values())


COLUMNS = (
    "start",
    "forward of a block",
    "last block, head, loss",
    "backward of these",
    "backward of a block",
    "finish",
    "optimizer",
    "step",
)


class Marks:
    """Points of steps, in the order in which the device comes to them."""

    def __init__(self, now: Callable[[], Any], milliseconds: Callable[[Any, Any], float]) -> None:
        """``now``: a point behind all work so far; ``milliseconds``: between two points."""
        self._now, self._milliseconds = now, milliseconds
        self.steps: list[dict[Any, Any]] = []

    def mark(self, name: Any) -> None:
        """Come to a point, for the first time in a step."""
        if name == BEGIN:
            self.steps.append({})
        assert name not in self.steps[-1], f"{name!r} comes twice in a step"
        self.steps[-1][name] = self._now()

    def watch(self, blocks: Sequence[Any]) -> None:
        """Mark where blocks begin and where their backward ends."""
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(self._hook(number))

    def _hook(self, number: int) -> Callable[..., None]:
        def begin(_: Any, args: tuple[Any, ...]) -> None:
            self.mark(("forward", number))
            args[0].register_hook(lambda _: self.mark(("backward", number)))

        return begin

    def segments(self) -> Segments:
        """Of all steps; what they are marked with has happened."""
        num_blocks = sum(isinstance(name, tuple) for name in self.steps[0]) // 2
        last = num_blocks - 1

        def between(first: Any, second: Any) -> float:
            return median(self._milliseconds(step[first], step[second]) for step in self.steps)

        def between_blocks(way: str, towards: int) -> float:
            pairs = [(at, at + 1)[::towards] for at in range(last)]
            return median(between((way, first), (way, second)) for first, second in pairs) if pairs else 0.0

        return Segments(
            start=between(BEGIN, ("forward", 0)),
            forward=between_blocks("forward", 1),
            loss=between(("forward", last), BACKWARD),
            first_gradients=between(BACKWARD, ("backward", last)),
            backward=between_blocks("backward", -1),
            finish=between(("backward", 0), GRADIENTS),
            optimizer=between(GRADIENTS, END),
            step=between(BEGIN, END),
        )


def marks_on(device: str) -> Marks:
    """On a GPU of its stream, else of the host."""
    if device != "cuda":
        return Marks(time.perf_counter, lambda first, second: (second - first) * 1e3)
    import torch

    def now() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    return Marks(now, lambda first, second: first.elapsed_time(second))
