"""Which pieces of matrices are ranges of their stacks' memory, and where."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hp_optim.muon.owners import Task
from hp_optim.muon.parts import Box, alone
from hp_optim.muon.ranges import Ranges, ranges_of
from hp_optim.muon.routes import Cut, Held, Place, Route

pytestmark = pytest.mark.once


def task(*size: int) -> Task:
    box = Box((0,) * len(size), size)
    return Task(0, box, size[-2], size[-1], None, alone(box, size, 0))


def route(
    arriving: Sequence[Place], kept: Sequence[Place] = (), returned: Sequence[Place] | None = None
) -> Route:
    cuts = [Cut(0, place.task, Held(place.box), place.box, True) for place in kept]
    back = tuple(arriving if returned is None else returned)
    return Route((), (), tuple(arriving), (), tuple(zip(cuts, kept, strict=True)), back, (), (), ())


def rows(number: int, start: int, length: int, cols: int = 5) -> Place:
    return Place(number, Box((start, 0), (length, cols)))


def test_whole_rows_are_ranges_and_one_split_of_a_stack_yields_them() -> None:
    tasks = [task(6, 5), task(4, 5), task(6, 5)]
    arriving = [rows(2, 0, 2), rows(0, 0, 2), rows(1, 1, 3), rows(0, 4, 2), rows(2, 4, 2)]
    kept = [rows(0, 2, 2), rows(2, 2, 2), rows(1, 0, 1)]
    found = ranges_of(tasks, [(0, 2), (1,)], route(arriving, kept))
    assert isinstance(found, Ranges)
    assert found.sizes == ((10,) * 6, (5, 15))
    stacks = [np.arange(60).reshape(2, 6, 5), np.arange(20).reshape(1, 4, 5)]
    parts = [
        np.split(stack.reshape(-1), np.cumsum(sizes)[:-1])
        for stack, sizes in zip(stacks, found.sizes, strict=True)
    ]
    where = {0: stacks[0][0], 2: stacks[0][1], 1: stacks[1][0]}
    for places, spots in ((arriving, found.arriving), (kept, found.kept), (arriving, found.returned)):
        for place, spot in zip(places, spots, strict=True):
            start, length = place.box.offset[0], place.box.size[0]
            expected = where[place.task][start : start + length].reshape(-1)
            np.testing.assert_array_equal(parts[spot.stack][spot.number], expected)


def test_a_replica_gets_the_range_that_another_one_gets() -> None:
    found = ranges_of([task(2, 5)], [(0,)], route([rows(0, 1, 1)], [rows(0, 0, 1)], [rows(0, 1, 1)] * 2))
    assert found is not None and found.returned == found.arriving * 2


def test_experts_of_one_and_cuts_within_one_row_are_ranges() -> None:
    found = ranges_of([task(1, 2, 5)], [(0,)], route([Place(0, Box((0, 0, 0), (1, 2, 5)))]))
    assert found is not None and found.sizes == ((10,),)
    pieces = [Place(0, Box((0, 0), (1, 3))), Place(0, Box((0, 3), (1, 2))), rows(0, 1, 1)]
    found = ranges_of([task(2, 5)], [(0,)], route(pieces))
    assert found is not None and found.sizes == ((3, 2, 5),)
    assert ranges_of([], [], route([])) == Ranges((), (), (), ())


@pytest.mark.parametrize(
    "arriving",
    [
        [Place(0, Box((0, 0), (2, 3))), Place(0, Box((0, 3), (2, 2)))],
        [rows(0, 1, 1)],
        [rows(0, 0, 1)],
        [rows(0, 0, 2), rows(0, 1, 1)],
    ],
    ids=["columns", "a gap", "a gap at the end", "an overlap"],
)
def test_other_pieces_are_none(arriving: list[Place]) -> None:
    assert ranges_of([task(2, 5)], [(0,)], route(arriving)) is None


def test_what_is_returned_in_other_pieces_than_it_came_is_none() -> None:
    assert ranges_of([task(2, 5)], [(0,)], route([rows(0, 0, 2)], (), [rows(0, 0, 1), rows(0, 1, 1)])) is None
