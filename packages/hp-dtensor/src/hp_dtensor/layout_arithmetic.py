"""The arithmetic of layouts: slices, their numbers and shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hp_dtensor.cuts import Stack, block_of, stacks_of
from hp_dtensor.placements import Placement, RaggedShard, Shard


class LayoutArithmetic:
    """What a :class:`hp_dtensor.Layout` can say about slices. Any rank may ask about any other. No communication."""

    __slots__ = ()

    _mesh: Any
    _placements: tuple[Placement, ...]
    _ndim: int | None

    def repeat_num(self) -> int:
        """How many ranks hold the same slice: the ranks of the mesh by the sizes of the mesh dims that cut.

        Slices along ``interleaved_parallel`` lie on one rank and do not count.
        """
        virtual = self._virtual_dim()
        used = [i for i, p in enumerate(self._placements) if isinstance(p, Shard) and i != virtual]
        return len(self._mesh.rank_list) // math.prod(self._mesh.shape[i] for i in used)

    def get_dim_split_num(self, dim: int) -> int:
        """Into how many slices a tensor dim is cut."""
        return math.prod(self._mesh.shape[i] for i in self._stacks(self._known_ndim("dim"))[dim])

    def get_split_id(self, dim: int, rank: int) -> int:
        """Which slice of a tensor dim a global rank holds; the outermost cut counts most. ValueError if it is not in the mesh."""
        coordinate, number = self._coordinate(rank), 0
        for i in self._stacks(self._known_ndim("dim"))[dim]:
            number = number * self._mesh.shape[i] + coordinate[i]
        return number

    def slice_shape(self, global_shape: Sequence[int], rank: int | None = None) -> tuple[int, ...]:
        """The shape of a rank's slice (default: this rank), by the chunk rule."""
        coordinate = self._coordinate(self._mesh.rank if rank is None else rank)
        stacks = self._stacks(len(global_shape))
        return block_of(tuple(global_shape), stacks, self._mesh.shape, coordinate)[0]

    def get_global_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole whose even slices have ``local_shape``."""
        stacks = self._stacks(len(local_shape))
        return tuple(
            n * math.prod(self._mesh.shape[i] for i in stack)
            for n, stack in zip(local_shape, stacks, strict=True)
        )

    def _known_ndim(self, what: str) -> int:
        if self._ndim is None:
            raise ValueError(
                f"{what} of {self} needs the number of tensor dims: make the layout with one alias per tensor dim, or call "
                f"placement_to_tensor_map(ndim)"
            )
        return self._ndim

    def _stacks(self, ndim: int) -> tuple[Stack, ...]:
        from hp_dtensor.spec import resolve

        if any(isinstance(p, RaggedShard) for p in self._placements):
            raise ValueError(
                f"{self}: a RaggedShard has runs of elements, not slices; make a spec or a DTensor of it"
            )
        return stacks_of(resolve(self._mesh, self._placements, ndim), self._mesh.shape, ndim)

    def _virtual_dim(self) -> int | None:
        names = self._mesh.mesh_dim_names
        return len(names) - 1 if names and names[-1] == "interleaved_parallel" else None

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        ranks, shape, virtual = tuple(self._mesh.rank_list), self._mesh.shape, self._virtual_dim()
        if rank not in ranks:
            raise ValueError(f"rank {rank!r} is not in {self._mesh}; give one of its ranks")
        place, coordinate = ranks.index(rank), []
        for i in reversed(range(len(shape))):
            size = 1 if i == virtual else shape[i]
            coordinate.append(place % size)
            place = place // size
        return tuple(reversed(coordinate))
