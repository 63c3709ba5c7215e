"""Pieces of many sizes that go through a buffer which may be smaller than all of them: pure arithmetic, no framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Some neighbouring elements of one piece."""

    piece: int
    """Which one."""
    start: int
    """First element in it."""
    numel: int
    offset: int
    """First element in the buffer."""


@dataclass(frozen=True)
class Batch:
    """What is in the buffer at one time: parts one after the other."""

    parts: tuple[Part, ...]
    start: int
    """First element, counted through all pieces."""
    numel: int


def cut_into_batches(sizes: Sequence[int], capacity: int) -> list[Batch]:
    """All elements of pieces of these sizes, in order, at most ``capacity`` (at least 1) at a time. Empty pieces have no parts."""
    assert capacity > 0
    batches: list[Batch] = []
    parts: list[Part] = []
    start = filled = 0
    for piece, size in enumerate(sizes):
        done = 0
        while done < size:
            numel = min(capacity - filled, size - done)
            parts.append(Part(piece, done, numel, filled))
            done, filled = done + numel, filled + numel
            if filled == capacity:
                batches.append(Batch(tuple(parts), start, filled))
                start, filled, parts = start + filled, 0, []
    if parts:
        batches.append(Batch(tuple(parts), start, filled))
    return batches
