"""What a parameter was before it was sharded, and what it is to look like while it is whole: a plain tensor, or a DTensor."""

from __future__ import annotations

from typing import Any

from hp_dtensor import DTensor, Placement, Replicate, Shard, StridedShard
from hp_dtensor.storage_mesh import storage_mesh
from hp_fsdp.layout import Slot
from hp_fsdp.places import Places
from hp_platform.mesh import DeviceMesh
from hp_platform.platform import Platform
from hp_platform.protocols.tensor import Tensor

_ADVICE = (
    "modules that fully_shard was called on show their whole parameters in forward, and the pieces at all other times. Call "
    "that module itself; if the computation begins in another method of it, call register_forward_method(module, {method}) "
    "once before. A tensor that is equal on all ranks is given as DTensor.from_local(x, parameter.device_mesh, "
    "[Replicate(), ...]), and parameter.full_tensor() is the whole one"
)


class Origin:
    """[Note: sharded twice] A parameter that is a DTensor already (over tensor-parallel ranks, say) is sharded further: every
    rank's local tensor is cut among the data-parallel ranks that hold the same one. The sharded parameter is a DTensor over
    both meshes. The cut that was there stays the outer one, also where both cut the same dim: then the data-parallel
    one is a StridedShard if its mesh dim stands further left.
    """

    def __init__(self, platform: Platform, parameter: Any) -> None:
        self.platform = platform
        self.mesh: DeviceMesh | None = None
        """Of a DTensor."""
        self.placements: tuple[Placement, ...] = ()
        self.global_shape: tuple[int, ...] = tuple(parameter.shape)
        self.local_shape: tuple[int, ...] = self.global_shape
        if isinstance(parameter, DTensor):
            self.mesh = parameter.device_mesh
            self.placements = tuple(parameter.placements)
            self.local_shape = tuple(parameter.to_local().shape)

    def local(self, parameter: Any) -> Tensor:
        """What this rank holds of the parameter before it is sharded."""
        return self.platform.detach(parameter if self.mesh is None else parameter.to_local())

    def sharded(self, chunk: Tensor, places: Places, slot: Slot | None) -> Any:
        """The DTensor whose local tensor is this rank's chunk."""
        mesh = places.mesh if self.mesh is None else DeviceMesh.concatenate([places.mesh, self.mesh])
        placements = self._placements(mesh, places, slot)
        mesh = storage_mesh(mesh, _ADVICE)
        return DTensor.from_local(chunk, mesh, placements, shape=self.global_shape)

    def shown(self, whole: Tensor) -> Any:
        """What the module shows while the parameter is whole: a tensor over the memory of ``whole``, outside of any graph."""
        whole = self.platform.detach(whole)
        if self.mesh is None:
            return whole
        dtensor = DTensor.from_local(whole, self.mesh, self.placements, shape=self.global_shape)
        return self.platform.parameter(dtensor, requires_grad=False)

    def leaf(self, shown: Any) -> Tensor:
        """The plain tensor that gathers the gradient of what is shown."""
        return shown if self.mesh is None else shown.to_local()

    def _placements(self, mesh: DeviceMesh, places: Places, slot: Slot | None) -> tuple[Placement, ...]:
        if self.mesh is None:
            return places.placements(None if slot is None else slot.dim)
        own = dict(zip(self.mesh.mesh_dim_names or (), self.placements, strict=True))
        names = mesh.mesh_dim_names or ()
        shard_name = (places.mesh.mesh_dim_names or ())[-1]
        found: list[Placement] = []
        for at, name in enumerate(names):
            if name in own:
                found.append(own[name])
            elif name != shard_name or slot is None:
                found.append(Replicate())
            else:
                cuts = [
                    mesh.size(right)
                    for right in range(at + 1, len(names))
                    if _cuts(own.get(names[right]), slot.dim)
                ]
                factor = 1
                for size in cuts:
                    factor = factor * size
                found.append(Shard(slot.dim) if factor == 1 else StridedShard(slot.dim, factor))
        return tuple(found)


def _cuts(placement: Placement | None, dim: int) -> bool:
    return isinstance(placement, Shard) and placement.dim == dim
