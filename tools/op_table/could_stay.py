"""Whether an operation could have run on the pieces as they lie, found by trying.

The plain function runs on each rank's pieces, and every placement of every result is tried: pieces that make up the whole
result by one of them, for several draws of the values, show that the bytes a rule moved were not needed for the values. What
this cannot see: ways that need other arguments on each rank (the shape given to view), another function on each, or pieces
without elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hp_dtensor.pieces import coordinates, piece
from hp_dtensor.placements import Partial, Placement, Shard
from hp_dtensor.rules import RULES
from hp_dtensor.spec import local_block
from hp_platform import get_platform
from op_table.bytes_moved import MESH, filled
from op_table.calls import Call, Sketch

DRAWS = 16
"""So many draws rarely agree by accident, also where results are truth values."""
DENSITIES = (0.5, 0.1, 0.9, 0.02, 0.98)
"""Of truth values and of numbers that are not 0, in turn: of all and any some pieces must disagree with the whole."""
PERIOD = 3
"""Every other draw has as many truths as the tests have, who give as many values to write."""
# Values below 1e3 in float64, summed over two ranks: 1e3 roundings.
TOLERANCE = 1e-10

Array = Any


def could_stay(call: Call, tensors: Sequence[Sketch], placements: Sequence[Placement]) -> bool:
    """Whether some placement of each result holds for all draws of the values."""
    import numpy as np

    possible: list[set[str]] = []
    first: list[Array] = []
    is_the_same = True
    for draw in range(DRAWS):
        found = _ways(call, tensors, placements, draw)
        if found is None:
            continue
        whole, ways = found
        possible = [a & b for a, b in zip(possible, ways, strict=False)] if first else ways
        if not possible or not all(possible):
            return False
        first = first or whole
        is_the_same = is_the_same and all(
            np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(first, whole, strict=True)
        )
    assert first, f"{call.words} takes none of the values drawn"
    if is_the_same:  # results that do not depend on the values show nothing
        return False
    if RULES[call.rule].in_place:  # what is written into stays as it lies
        return short(placements[0]) in possible[0]
    # Along a mesh dim all results are Replicate, or none is: the gradients of the inputs are counted alike for all.
    return all("R" in ways for ways in possible) or all(ways - {"R"} for ways in possible)


def drawn(tensors: Sequence[Sketch], draw: int) -> list[Array]:
    """Values of the tensors, others for each draw."""
    import numpy as np

    rng = np.random.default_rng(draw)
    values: list[Array] = []
    for position, x in enumerate(tensors):
        if x.dtype == "bool" and draw % 2:
            values.append(rng.random(x.shape) < DENSITIES[draw // 2 % len(DENSITIES)])
        elif x.dtype == "bool":
            steps = [(i * 7 + position * 3 + 1) % 31 for i in range(math.prod(x.shape))]
            values.append(rng.permutation([step % PERIOD == 0 for step in steps]).reshape(x.shape))
        elif x.dtype == "int64":
            some = rng.random(x.shape) < DENSITIES[draw // 2 % len(DENSITIES)] if draw % 2 else True
            values.append(np.asarray(rng.integers(0, int(x.high), x.shape) * some))
        else:
            numbers = np.asarray(rng.uniform(x.low, x.high, x.shape))
            is_complex = x.dtype == "complex128"
            values.append(numbers + 1j * np.flip(numbers) if is_complex else numbers)
    return values


def _ways(
    call: Call, tensors: Sequence[Sketch], placements: Sequence[Placement], draw: int
) -> tuple[list[Array], list[set[str]]] | None:
    """The results, and of each the placements by which those of ranks make it up; none at all where a rank's call fails.

    None if already the whole call does not take such values, as when a tensor has one for each truth of a mask.
    """
    import numpy as np

    platform = get_platform()
    rng = np.random.default_rng(1000 + draw)
    values = [platform.tensor(v, x.dtype) for v, x in zip(drawn(tensors, draw), tensors, strict=True)]
    # Of a sum the first rank holds anything, the other what is missing: no share may be special, such as 0 or all.
    shares = [
        platform.tensor(
            np.asarray(
                rng.uniform(-2, 2, x.shape)
                if x.dtype in ("float64", "complex128")
                else rng.integers(-2, 3, x.shape)
            ),
            x.dtype,
        )
        for x in tensors
    ]
    try:
        whole = _results(call.function(*filled(call, values), **call.kwargs))
    except (RuntimeError, ValueError):
        return None
    of_ranks = []
    for coordinate in coordinates(MESH):
        local = [
            (value - share if coordinate[0] else share)
            if isinstance(placement, Partial)
            else piece(value, (placement,), MESH, coordinate)
            for value, share, placement in zip(values, shares, placements, strict=True)
        ]
        # Some kernels end the process on tensors without elements.
        if any(math.prod(x.shape) == 0 for x in local):
            return whole, []
        try:
            results = _results(call.function(*filled(call, local), **call.kwargs))
        except Exception:  # whatever a framework says to pieces it cannot take: then they cannot stay
            return whole, []
        if len(results) != len(whole):
            return whole, []
        of_ranks.append(results)
    return whole, [_placements_of(x, *parts) for x, *parts in zip(whole, *of_ranks, strict=True)]


def _placements_of(whole: Array, first: Array, second: Array) -> set[str]:
    """The names of the placements by which the results of two ranks make up the whole one."""
    import numpy as np

    found: set[str] = set()

    def try_one(name: str, joined: Array) -> None:
        if np.allclose(joined, whole, rtol=0, atol=TOLERANCE, equal_nan=True):
            found.add(name)

    if first.shape == second.shape == whole.shape:
        if np.array_equal(first, second, equal_nan=first.dtype.kind == "f"):
            try_one("R", first)
        if whole.dtype != bool:
            try_one("P", first + second)
    for dim in range(whole.ndim):
        own = [tuple(local_block(whole.shape, (Shard(dim),), MESH, c)[0]) for c in coordinates(MESH)]
        if own == [first.shape, second.shape]:
            try_one(f"S({dim})", np.concatenate([first, second], dim))
    return found


def short(placement: Placement | None) -> str:
    """As the table writes a placement; None for what is no tensor."""
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    return "value" if placement is None else "R"


def _results(found: Any) -> list[Array]:
    import numpy as np

    platform = get_platform()
    results = list(found) if isinstance(found, (list, tuple)) else [found]
    return [platform.to_numpy(x) if platform.is_tensor(x) else np.asarray(x) for x in results]
