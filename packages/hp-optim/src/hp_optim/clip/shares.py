"""Which gradients a rank measures, and with which ranks it combines the result.

[Note: one collective per mesh] Over a mesh with the dims (replicate, shard, tensor), some gradients are cut along one dim, some
along two, some along none. Summing each kind over its own dims would take a collective for each kind and dim. Instead there is
one for the mesh, over the group that spans all dims along which anything is cut (the joined group), and a gradient that is the same
on several ranks of that group is measured by the first of them alone. So everything counts once, and ranks share the work.

[Note: the same on all ranks] A rank may have an empty piece, or no gradient where others have one; it must take part all the
same. So what is cut is read off the parameters, which all ranks of a mesh have, and not only off the gradients; such a rank adds
the neutral value. Collectives are started in ascending order of their ranks, which is one order for the whole job: ranks
that are in several groups meet without waiting for each other in a circle. Their results are combined in the order of the meshes,
so that no rank rounds otherwise than another.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hp_dtensor.spec import Spec

ALONE: tuple[int, ...] = ()
"""Instead of the ranks of a group: what needs no collective."""
Ranks = tuple[int, ...]


class Shares:
    """Answers for the specs of one call."""

    def __init__(self, specs: Iterable[Spec]) -> None:
        cut: dict[Any, set[int]] = {}
        for spec in specs:
            cut.setdefault(spec.mesh, set()).update(_cut_dims(spec))
        self._dims = {mesh: tuple(sorted(dims)) for mesh, dims in cut.items()}
        self._known: dict[Spec | None, Ranks | None] = {None: ALONE}

    def groups(self) -> dict[Ranks, Any]:
        """Ranks of every group that this rank combines with, and a mesh that it lies on: in the order in which the meshes occur, which
        is the same on all ranks. Meshes may share a group.
        """
        found: dict[Ranks, Any] = {}
        for mesh, dims in self._dims.items():
            if dims:
                found.setdefault(joined_ranks(mesh, dims), mesh)
        return found

    def of(self, spec: Spec | None) -> Ranks | None:
        """With whom the value of such a gradient is combined; None where another rank measures it."""
        known = self._known
        if spec not in known:
            assert spec is not None
            dims, coordinate = self._dims[spec.mesh], spec.mesh.get_coordinate()
            copies = [dim for dim in dims if spec.placements[dim].is_replicate()]
            is_first = all(coordinate[dim] == 0 for dim in copies)
            known[spec] = joined_ranks(spec.mesh, dims) if is_first else None
        return known[spec]


def joined_ranks(mesh: Any, dims: tuple[int, ...]) -> Ranks:
    """Global ranks, ascending, that differ from this one along ``dims`` only; :data:`ALONE` for no dims."""
    if not dims:
        return ALONE
    key = ("joined_ranks", dims)
    found: Ranks | None = mesh.interned.get(key)
    if found is None:
        ranks = {mesh.rank}
        for dim in dims:
            ranks = {other for rank in ranks for other in mesh.get_devices_for_axis(dim, rank)}
        found = mesh.interned.setdefault(key, tuple(sorted(ranks)))
    return found


def _cut_dims(spec: Spec) -> list[int]:
    return [
        dim
        for dim, (size, placement) in enumerate(zip(spec.mesh.shape, spec.placements, strict=True))
        if size > 1 and not placement.is_replicate()
    ]
