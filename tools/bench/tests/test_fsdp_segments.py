"""The parts of a step by the points that a device comes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.cases.fsdp_segments import BACKWARD, BEGIN, COLUMNS, END, GRADIENTS, Marks, Segments


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class Input:
    """Of a block; its gradient comes when the test says so."""

    def __init__(self) -> None:
        self.hooks: list[Callable[[Any], None]] = []

    def register_hook(self, hook: Callable[[Any], None]) -> None:
        self.hooks.append(hook)


class Block:
    def register_forward_pre_hook(self, hook: Callable[..., None]) -> None:
        self.hook = hook


def step(clock: Clock, marks: Marks, blocks: list[Block], forwards: list[float]) -> None:
    """The embedding takes 2, a block backward twice its forward, head and loss 3 and 6, the rest of backward 1, the optimizer 4."""
    inputs = [Input() for _ in blocks]
    marks.mark(BEGIN)
    clock.time += 2
    for block, given, duration in zip(blocks, inputs, forwards, strict=True):
        block.hook(block, (given,))
        clock.time += duration
    clock.time += 3
    marks.mark(BACKWARD)
    clock.time += 6
    for given, duration in zip(reversed(inputs), reversed(forwards), strict=True):
        clock.time += 2 * duration
        for hook in given.hooks:
            hook(None)
    clock.time += 1
    marks.mark(GRADIENTS)
    clock.time += 4
    marks.mark(END)


def test_every_part_has_its_median() -> None:
    clock, blocks = Clock(), [Block() for _ in range(4)]
    marks = Marks(clock, lambda first, second: second - first)
    marks.watch(blocks)
    for forwards in ([5.0, 7.0, 9.0, 11.0], [5.0, 7.0, 9.0, 11.0], [50.0, 70.0, 90.0, 110.0]):
        step(clock, marks, blocks, forwards)
    found = marks.segments()
    # Backward from block 3's end to block 0's: of blocks 2, 1, 0.
    assert found == Segments(
        start=2,
        forward=7,
        loss=11 + 3,
        first_gradients=6 + 22,
        backward=14,
        finish=1,
        optimizer=4,
        step=2 + 32 + 3 + 6 + 64 + 1 + 4,
    )
    assert len(found.values()) == len(COLUMNS)


def test_a_point_that_comes_twice_is_no_measurement() -> None:
    marks = Marks(Clock(), lambda first, second: second - first)
    marks.mark(BEGIN)
    marks.mark(END)
    with pytest.raises(AssertionError, match="'end' comes twice"):
        marks.mark(END)
