"""Which of several ways to run an operation along one mesh dim moves the fewest bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hp_dtensor.placements import Placement
from hp_dtensor.spec import Spec


@dataclass(frozen=True)
class Way:
    """One way: how each input lies along the mesh dim, and how the output then does."""

    inputs: tuple[Placement, ...]
    output: Placement


def choose(specs: Sequence[Spec], mesh_dim: int, ways: Sequence[Way], output_size: int) -> Way:
    """The cheapest way; among equals the one that changes the fewest inputs, then the first.

    A way that moves something pays for a sum that it leaves behind, too, since somebody must reduce it.
    """

    def price(way: Way) -> tuple[float, int]:
        num_ranks = specs[0].mesh.shape[mesh_dim]
        pairs = [
            (spec, spec.placements[mesh_dim], wanted) for spec, wanted in zip(specs, way.inputs, strict=True)
        ]
        moved = sum(
            _cost(now, wanted, num_ranks) * math.prod(spec.shape)
            for spec, now, wanted in pairs
            if now != wanted
        )
        if moved and way.output.is_partial():
            moved = moved + 2 * output_size
        return moved, sum(now != wanted for _, now, wanted in pairs)

    return min(ways, key=price)


def _cost(now: Placement, wanted: Placement, num_ranks: int) -> float:
    """Bytes that a rank sends, in units of the whole tensor."""
    if num_ranks == 1 or now.is_replicate() or wanted.is_partial():
        return 0.0
    share = (num_ranks - 1) / num_ranks
    if now.is_partial():
        return share if wanted.is_shard() else 2 * share
    return share if wanted.is_replicate() else share / num_ranks
