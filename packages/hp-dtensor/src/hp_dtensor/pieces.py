"""The pieces of a whole tensor as the ranks of a mesh hold them, and the whole of pieces: what the rule checker compares.

Pieces of every rank are in one dictionary, by coordinate, as numpy arrays. Mesh dims are joined from the last to the
first, because the first one makes the outermost cut. Gradients follow [Note: how gradients are counted] in
:mod:`hp_dtensor.conversions`; of kinds of Partial other than sums they follow from the values, as the chain rule says.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hp_dtensor.no_elements import has_gradients
from hp_dtensor.placements import Partial, Placement
from hp_dtensor.rules.registry import Placements
from hp_dtensor.spec import local_block
from hp_platform import get_platform

Tensor = Any
Array = Any
Coordinate = tuple[int, ...]
Arrays = dict[Coordinate, Array]


# ----------------------------------------------------------------------------------------------------------- taken apart
def piece(x: Tensor, placements: Placements, mesh_shape: Sequence[int], coordinate: Coordinate) -> Tensor:
    """The part of a whole tensor at a coordinate, detached. A Partial is taken apart into unequal values."""
    platform = get_platform()
    sizes, offsets = local_block(x.shape, placements, mesh_shape, coordinate)
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        x = platform.narrow(x, dim, offset, size)
    x = platform.detach(x)
    for placement, num_ranks, index in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, Partial) and num_ranks > 1:
            x = _share(x, placement.reduce_op, num_ranks, index)
    return platform.clone(x)


def _share(x: Tensor, kind: str, num_ranks: int, index: int) -> Tensor:
    """One rank's value, of which ``num_ranks`` make ``x``; all are exact in binary."""
    if kind in ("sum", "avg"):
        # Twice 0.5, 1, 1.5, ... of whole numbers, and what is missing to 1.
        first = (num_ranks - 1) * (num_ranks + 2)
        if not has_gradients(x):
            return x * ((index + 1 if index else 1 - first // 2) * (num_ranks if kind == "avg" else 1))
        weight = 0.5 * (index + 1) if index else 1 - 0.25 * first
        return x * (weight * (num_ranks if kind == "avg" else 1))
    if kind == "prod":
        return x * (2.0 if index else 0.5 ** (num_ranks - 1))
    # Element by element another rank has the value that decides.
    decides = _of_every(x, num_ranks, index)
    if kind in ("any", "all"):
        return (x & decides) if kind == "any" else (x | ~decides)
    other = x - (index + 1) if kind == "max" else x + (index + 1)
    return get_platform().where(decides, x, other)


def _of_every(x: Tensor, num_ranks: int, index: int) -> Tensor:
    """True for each ``num_ranks``-th element."""
    import numpy as np

    platform = get_platform()
    flags = (np.arange(math.prod(x.shape)).reshape(tuple(x.shape)) % num_ranks) == index
    return platform.tensor(flags, "bool", platform.device_of(x))


# ---------------------------------------------------------------------------------------------------------- put together
def levels(pieces: Mapping[Coordinate, Array], placements: Placements, label: str | None) -> list[Arrays]:
    """Joined step by step: the last entry holds the pieces, entry d what is joined of mesh dims d and on, the first the whole.

    AssertionError, with ``label``, if replicas differ; without a label they are not compared.
    """
    joined = [dict(pieces)]
    for mesh_dim in reversed(range(len(placements))):
        inner, placement = joined[0], placements[mesh_dim]
        lines = _lines(inner, mesh_dim)
        joined.insert(0, {outer: _joined(parts, placement, label) for outer, parts in lines.items()})
    return joined


def assembled(
    pieces: Mapping[Coordinate, Tensor],
    placements: Placements,
    label: str = "pieces",
) -> Array:
    """The whole, as a numpy array, of the ranks' tensors. AssertionError, with ``label``, if replicas differ."""
    to_numpy = get_platform().to_numpy
    return levels({c: to_numpy(x) for c, x in pieces.items()}, placements, label)[0][()]


def _lines(arrays: Mapping[Coordinate, Array], mesh_dim: int) -> dict[Coordinate, list[Array]]:
    """The arrays along a mesh dim, by the coordinate before it."""
    lines: dict[Coordinate, list[Array]] = {}
    for coordinate in sorted(arrays):
        lines.setdefault(coordinate[:mesh_dim], []).append(arrays[coordinate])
    return lines


def _joined(parts: list[Array], placement: Placement, label: str | None) -> Array:
    import numpy as np

    if placement.is_shard():
        return np.concatenate(parts, placement.dim)  # type: ignore[attr-defined]
    if isinstance(placement, Partial):
        stacked = np.stack(parts)
        if placement.reduce_op == "avg":
            return stacked.mean(axis=0)
        return getattr(stacked, placement.reduce_op)(axis=0)
    if label is not None:
        _check_equal(parts, f"{label}: replicas differ")
    return parts[0]


def _check_equal(parts: list[Array], message: str) -> None:
    import numpy as np

    for other in parts[1:]:
        np.testing.assert_allclose(other, parts[0], rtol=1e-12, atol=1e-11, err_msg=message)


# -------------------------------------------------------------------------------------------------------------- gradients
def seeds(seed: Array, values: Mapping[Coordinate, Array], placements: Placements) -> Arrays:
    """The gradient that reaches each rank's result, if that of the whole is ``seed`` and the ranks' results are ``values``."""
    whole = levels(values, placements, None)
    found: Arrays = {(): seed}
    for mesh_dim, placement in enumerate(placements):
        lines = _lines(whole[mesh_dim + 1], mesh_dim)
        found = {
            (*outer, index): part
            for outer, g in found.items()
            for index, part in enumerate(_seeds(g, placement, lines[outer], whole[mesh_dim][outer]))
        }
    return found


def _seeds(g: Array, placement: Placement, parts: list[Array], whole: Array) -> list[Array]:
    import numpy as np

    if placement.is_shard():
        ends = np.cumsum([part.shape[placement.dim] for part in parts])  # type: ignore[attr-defined]
        return np.split(g, ends[:-1], placement.dim)  # type: ignore[attr-defined]
    kind = placement.reduce_op if isinstance(placement, Partial) else "replicate"
    if kind == "avg":
        return [g / len(parts) for _ in parts]
    if kind in ("max", "min"):
        decides = [part == whole for part in parts]
        return [g * own / np.sum(decides, axis=0) for own in decides]
    if kind == "prod":
        return [g * np.prod([*parts[:i], *parts[i + 1 :]], axis=0) for i in range(len(parts))]
    return [g for _ in parts]


def whole_gradient(
    grads: Mapping[Coordinate, Array],
    values: Mapping[Coordinate, Array],
    placements: Placements,
    marked: frozenset[int],
    label: str,
) -> Array:
    """The gradient of a whole input of those that the ranks see. Along the mesh dims ``marked`` those of replicas are summed."""
    whole = levels(values, placements, None)
    joined = dict(grads)
    for mesh_dim in reversed(range(len(placements))):
        held = _lines(whole[mesh_dim + 1], mesh_dim)
        joined = {
            outer: _gradient(
                parts, placements[mesh_dim], held[outer], whole[mesh_dim][outer], mesh_dim in marked, label
            )
            for outer, parts in _lines(joined, mesh_dim).items()
        }
    return joined[()]


def _gradient(
    parts: list[Array], placement: Placement, held: list[Array], whole: Array, is_marked: bool, label: str
) -> Array:
    import numpy as np

    if placement.is_shard():
        return np.concatenate(parts, placement.dim)  # type: ignore[attr-defined]
    kind = placement.reduce_op if isinstance(placement, Partial) else "replicate"
    if is_marked or kind in ("avg", "max", "min"):
        return np.sum(parts, axis=0)
    if kind == "prod":
        parts = [g * own / whole for g, own in zip(parts, held, strict=True)]
    _check_equal(parts, f"{label}: ranks see different gradients")
    return parts[0]


def coordinates(mesh_shape: Sequence[int]) -> list[Coordinate]:
    """Of all ranks."""
    return list(itertools.product(*map(range, mesh_shape)))
