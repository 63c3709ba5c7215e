"""Comparing over ranks, so that all of them come to the same verdict at the same moment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.spec import VIRTUAL_DIM, Spec, shown
from hp_platform import collectives, get_platform

Tensor = Any

_OWN_TOLERANCE = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-4, "complex64": 1e-4}
_OF_DOUBLE = 1e-10
_SMALLEST = 1e-37
"""Differences travel as float32; one that is smaller must not become zero there."""


@dataclass(frozen=True)
class Tolerance:
    """How far values may lie apart: ``atol + rtol * scale``, where the scale is the largest magnitude that takes part.

    Not by element: sums of pieces round otherwise than the sum of the whole, also where terms cancel.
    """

    rtol: float | None
    atol: float

    def limit(self, dtype_name: str, scale: float) -> float:
        """For floating values of this dtype."""
        rtol = _OWN_TOLERANCE.get(dtype_name, _OF_DOUBLE) if self.rtol is None else self.rtol
        return self.atol + rtol * scale


@dataclass(frozen=True)
class Check:
    """What one rank has found about one tensor. The same checks, in the same order, are made on all ranks of the mesh."""

    subject: str
    """``argument 0``, ``the result``, ``the gradient of the result``."""
    spec: Spec
    difference: float
    """The largest difference on this rank that is no rounding; 0 if there is none, inf for NaN beside a number."""
    mesh_dim: int | None
    """Along which replicas were compared; None where this rank's piece was looked at."""
    advice: str
    wrong_piece: str = ""
    """What is wrong with the piece of a rank that is not content."""


def largest(x: Tensor) -> float:
    """The largest finite magnitude in a local tensor; 0 where there is none."""
    import numpy as np

    values = get_platform().to_numpy(x)
    if values.size == 0 or values.dtype.kind not in "fc":
        return 0.0
    sizes = np.abs(values)
    return float(np.max(sizes, where=np.isfinite(sizes), initial=0.0))


def difference(x: Tensor, expected: Tensor, tolerance: Tolerance, scale: float = 0.0) -> float:
    """The largest difference between two local tensors of one shape, 0 within the tolerance. NaN equals NaN."""
    import numpy as np

    platform = get_platform()
    found, right = platform.to_numpy(x), platform.to_numpy(expected)
    if found.size == 0:
        return 0.0
    with np.errstate(all="ignore"):
        same = (found == right) | ((found != found) & (right != right))
        if same.all():
            return 0.0
        if found.dtype.kind == "b" or right.dtype.kind == "b":
            return 1.0
        if found.dtype.kind not in "fc":
            return float(np.max(np.abs(found.astype("float64") - right.astype("float64"))))
        apart = np.where(same, 0.0, np.abs(found.astype(np.result_type(found, right)) - right))
    worst = math.inf if not np.isfinite(apart).all() else float(apart.max())
    limit = tolerance.limit(platform.dtype_name(x.dtype), max(scale, largest(expected)))
    return worst if worst > limit else 0.0


def compared_dims(spec: Spec) -> Iterator[int]:
    """Mesh dims with more than one rank."""
    names = getattr(spec.mesh, "mesh_dim_names", None) or ()
    for dim, num_ranks in enumerate(spec.mesh.shape):
        if num_ranks > 1 and not (dim < len(names) and names[dim] == VIRTUAL_DIM):
            yield dim


def replicas(local: Tensor, spec: Spec, subject: str, tolerance: Tolerance, advice: str) -> Iterator[Check]:
    """One check for each mesh dim along which a tensor of ``spec`` is Replicate. One broadcast of the local bytes for each."""
    platform = get_platform()
    fits = tuple(local.shape) == spec.local_shape
    if not fits:  # what is broadcast must have one shape on all ranks
        local = platform.zeros(spec.local_shape, local.dtype, platform.device_of(local))
    for dim in compared_dims(spec):
        if not spec.placements[dim].is_replicate():
            continue
        group = spec.mesh.get_group(dim)
        first = group.ranks[spec.mesh.group_positions(dim)[0]]
        theirs = collectives.broadcast(platform.contiguous(platform.detach(local)), first, group)
        apart = difference(local, theirs, tolerance) if fits else math.inf
        yield Check(subject, spec, apart, dim, advice)


def first_lie(checks: Sequence[Check], device: str) -> str | None:
    """What is wrong with the first tensor of which any rank has found something, the same text on all ranks of its mesh.

    Communication: one all-reduce per mesh dim of ``4 * len(checks) * ranks`` bytes.
    """
    meshes: list[Any] = []
    for check in checks:
        if not any(mesh is check.spec.mesh for mesh in meshes):
            meshes.append(check.spec.mesh)
    for mesh in meshes:
        own = [check for check in checks if check.spec.mesh is mesh]
        for check, of_ranks in zip(own, _of_all_ranks(own, device), strict=True):
            if any(of_ranks):
                return _described(check, of_ranks)
    return None


def _of_all_ranks(checks: Sequence[Check], device: str) -> list[list[float]]:
    """Each check's differences, by the position of the rank in the mesh."""
    platform, spec = get_platform(), checks[0].spec
    ranks = spec.mesh.rank_list
    me = ranks.index(spec.mesh.rank)
    rows = [
        [max(c.difference, _SMALLEST) if i == me and c.difference else 0.0 for i in range(len(ranks))]
        for c in checks
    ]
    table = platform.tensor(rows, "float32", device)
    for dim in compared_dims(spec):
        table = collectives.all_reduce(table, spec.mesh.get_group(dim), "max")
    found: list[list[float]] = platform.to_numpy(table).tolist()
    return found


def _described(check: Check, of_ranks: Sequence[float]) -> str:
    mesh = check.spec.mesh
    differing = [rank for rank, apart in zip(mesh.rank_list, of_ranks, strict=True) if apart]
    ranks = f"rank{'s' if len(differing) > 1 else ''} {', '.join(map(str, differing))}"
    where = f"{check.subject} is declared {shown(check.spec.placements)} of shape {check.spec.shape}, but "
    if check.mesh_dim is None:
        lie = f"on {ranks} it {check.wrong_piece}"
    else:
        name = mesh.mesh_dim_names[check.mesh_dim] if mesh.mesh_dim_names else None
        along = f"mesh dim {check.mesh_dim}" + (f" ({name!r})" if name else "")
        lie = f"along {along} {ranks} hold{'s' if len(differing) == 1 else ''} other values than the first rank there"
    return f"{where}{lie}; the largest difference is {max(of_ranks):.6g}. {check.advice}"
