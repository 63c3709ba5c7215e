"""Ragged shards: runs of cells of unequal length, by the units that each rank was given. Arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hp_dtensor.placements import Placement, RaggedShard


def ragged_dim(placements: Sequence[Placement]) -> int | None:
    """The mesh dim that is ragged; None if there is none."""
    return next((i for i, p in enumerate(placements) if isinstance(p, RaggedShard)), None)


def check_ragged(placements: Sequence[Placement], mesh_shape: Sequence[int], shape: Sequence[int]) -> None:
    """ValueError if a RaggedShard among the placements does not fit mesh and shape."""
    at = ragged_dim(placements)
    if at is None:
        return
    placement = placements[at]
    assert isinstance(placement, RaggedShard)
    others = [p for i, p in enumerate(placements) if i != at and not p.is_replicate()]
    if others:
        raise ValueError(
            f"{placement} along mesh dim {at} beside {others[0]}: all other mesh dims must be Replicate(); flatten the mesh "
            f"dims to one, or shard with Shard(dim)"
        )
    if len(placement.local_units) != mesh_shape[at]:
        raise ValueError(
            f"{placement} has {len(placement.local_units)} units for the {mesh_shape[at]} ranks along mesh dim {at}; give "
            f"one per rank"
        )
    if len(placement.dims) > len(shape):
        raise ValueError(
            f"{placement} flattens {len(placement.dims)} dims, but the tensor has {len(shape)}; give leading dims that it has"
        )
    cells, units = math.prod(shape[: len(placement.dims)]), sum(placement.local_units)
    if cells % units:
        raise ValueError(
            f"{placement}: the {cells} cells of shape {tuple(shape)} do not divide by the sum of the units, {units}; choose "
            f"units whose sum divides the number of cells"
        )


def run_sizes(placement: RaggedShard, shape: Sequence[int]) -> tuple[int, ...]:
    """For each rank along the mesh dim the number of elements that it holds; they follow each other in flat order."""
    per_unit = math.prod(shape) // sum(placement.local_units)
    return tuple(units * per_unit for units in placement.local_units)
