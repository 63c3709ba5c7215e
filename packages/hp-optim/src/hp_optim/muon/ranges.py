"""Pieces of a batch's matrices that are ranges of their stacks' memory, as whole rows are. Arithmetic only.

[Note: pieces by one split] Every element of an own matrix comes from one piece. Where all pieces are ranges, as of parameters that are
sharded over their first dim, they follow each other in a stack without gaps: one split of the stack yields all that is copied to or
from. Views of boxes cost the host some microseconds each, which for hundreds of pieces takes as long as the products take the
device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hp_optim.muon.owners import Task
from hp_optim.muon.parts import Box
from hp_optim.muon.routes import Place, Route


class Spot(NamedTuple):
    """A piece among those of all stacks."""

    stack: int
    number: int


@dataclass(frozen=True)
class Ranges:
    """Of a batch, whose pieces all are."""

    sizes: tuple[tuple[int, ...], ...]
    """Of each stack how many elements its pieces have, in the order in which they lie there."""
    arriving: tuple[Spot, ...]
    """Of :attr:`Route.arriving`."""
    kept: tuple[Spot, ...]
    returned: tuple[Spot, ...]


def ranges_of(tasks: Sequence[Task], stacks: Sequence[tuple[int, ...]], route: Route) -> Ranges | None:
    """``stacks``: the positions of the tasks of each. None where some piece is no range, or is returned in other pieces than it came."""
    places = {task: (stack, at) for stack, found in enumerate(stacks) for at, task in enumerate(found)}
    kept = [place for _, place in route.kept]
    found: list[list[tuple[int, int, Place]]] = [[] for _ in stacks]
    for place in (*route.arriving, *kept):
        whole = tasks[place.task].box.size
        start = _start(place.box, whole)
        if start is None:
            return None
        stack, at = places[place.task]
        found[stack].append((at * math.prod(whole) + start, place.box.volume, place))
    spots: dict[Place, Spot] = {}
    sizes = []
    for stack, (numbers, pieces) in enumerate(zip(stacks, found, strict=True)):
        pieces.sort(key=lambda piece: piece[:2])
        end = 0
        for number, (start, volume, place) in enumerate(pieces):
            if start != end:
                return None
            end = start + volume
            spots[place] = Spot(stack, number)
        if end != sum(tasks[number].box.volume for number in numbers):
            return None
        sizes.append(tuple(volume for _, volume, _ in pieces))
    if any(place not in spots for place in route.returned):
        return None
    return Ranges(
        tuple(sizes),
        tuple(spots[place] for place in route.arriving),
        tuple(spots[place] for place in kept),
        tuple(spots[place] for place in route.returned),
    )


def _start(box: Box, whole: Sequence[int]) -> int | None:
    """Where the box begins in the memory of a contiguous tensor of the shape ``whole``; None if it is no range of it."""
    dims = [dim for dim, size in enumerate(whole) if box.size[dim] != size]
    # In front of the last dim that is cut there must be one of each, behind it all.
    if any(box.size[dim] != 1 for dim in range(dims[-1] if dims else 0)):
        return None
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    return sum(offset * stride for offset, stride in zip(box.offset, strides, strict=True))
