"""Which classes this rank has scores of, and how ranks put together what each knows of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hp_dtensor import across, conversions
from hp_dtensor.chunk import chunk_offset, chunk_sizes
from hp_dtensor.spec import Spec
from hp_platform import DeviceMesh, ProcessGroup, collectives

Tensor = Any


@dataclass(frozen=True)
class ClassCut:
    """This rank's part of the classes: ``start ... start + size - 1`` of ``num_classes``; it may be empty."""

    num_classes: int
    start: int
    size: int
    groups: tuple[Any, ...]
    """The groups of several ranks along which the classes are cut; over all of them the parts make up the whole."""

    def part(self, start: int, length: int) -> ClassCut:
        """Some of this rank's classes, as if it had these alone."""
        return ClassCut(self.num_classes, self.start + start, length, ())

    def begin_largest(self, x: Tensor) -> Callable[[], Tensor]:
        """Start the largest of the ranks' ``x``; the function that is returned waits for it. One all-reduce per group."""
        if len(self.groups) == 1 and isinstance(self.groups[0], ProcessGroup):
            return collectives.all_reduce(x, self.groups[0], "max", async_op=True).wait
        for group in self.groups:
            x = conversions.reduced(x, group, "max")
        return lambda: x

    def total(self, x: Tensor) -> Tensor:
        """The sum of the ranks' ``x``, without gradient. One all-reduce per group."""
        for group in self.groups:
            x = conversions.reduced(x, group)
        return x

    def differentiable_total(self, x: Tensor) -> Tensor:
        """The sum of the ranks' ``x``, which all of them go on with alike. One all-reduce per group; backward: the identity."""
        for group in self.groups:
            x = conversions.all_reduce(x, group)
        return x

    def used_differently(self, x: Tensor) -> Tensor:
        """``x``, equal on all ranks, for what each rank does with its own classes. Backward: one all-reduce per group."""
        return conversions.mark(x, self.groups) if self.groups else x


def cut_of_spec(spec: Spec, dim: int) -> ClassCut:
    """Of a tensor that lies so, whose dim ``dim`` are the classes."""
    groups = tuple(spec.mesh.get_group(mesh_dim) for mesh_dim in across.cutting(spec, (dim,)))
    return ClassCut(spec.shape[dim], spec.local_offset[dim], spec.local_shape[dim], groups)


def cut_of_ranks(
    what: str, mesh: Any, group: Any, num_classes: int | None, num_local: int, tensor: str
) -> ClassCut:
    """Of ``num_classes`` cut over a mesh of one dim or a group; ``num_local`` is what this rank's plain tensor has.

    None for both is one process with all classes. ValueError if the ranks are not given clearly, or the sizes do not fit.
    """
    if mesh is not None and group is not None:
        raise ValueError(f"{what} got mesh and group: give the one along which the classes are cut")
    if mesh is None and group is None:
        if num_classes is not None and num_classes != num_local:
            raise ValueError(
                f"{what} got {tensor} with {num_local} of num_classes={num_classes} classes, but neither mesh nor group: give "
                f"the mesh or group along which the classes are cut"
            )
        return ClassCut(num_local, 0, num_local, ())
    ranks, index = _ranks(what, mesh, group)
    if num_classes is None:
        raise ValueError(
            f"{what} cuts classes over {ranks.size} ranks, which may have unequal numbers of them: give num_classes, of all "
            f"ranks together (this one has {num_local})"
        )
    sizes = chunk_sizes(num_classes, ranks.size)
    if num_local != sizes[index]:
        raise ValueError(
            f"{what} got {tensor} with {num_local} classes on rank {index} of {ranks.size}, but of num_classes={num_classes} it "
            f"has {sizes[index]}: the ranks have {list(sizes)}, as torch.chunk cuts"
        )
    start = chunk_offset(num_classes, ranks.size, index)
    return ClassCut(num_classes, start, num_local, (ranks,) if ranks.size > 1 else ())


def _ranks(what: str, mesh: Any, group: Any) -> tuple[ProcessGroup, int]:
    """The group along which classes are cut, and which part is this rank's."""
    if group is not None:
        if not isinstance(group, ProcessGroup):
            raise ValueError(f"{what}: group is a hp_platform.ProcessGroup, got {type(group).__name__}")
        return group, group.rank
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"{what}: mesh is a hp_platform.DeviceMesh of one dim, got {type(mesh).__name__}")
    if len(mesh.shape) != 1:
        raise ValueError(
            f"{what} cuts classes along one mesh dim, got {mesh}: give that dim's mesh, such as mesh['tp']"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError(f"{what}: this rank is not in {mesh}: call it on ranks of the mesh only")
    return mesh.get_group(0), coordinate[0]
