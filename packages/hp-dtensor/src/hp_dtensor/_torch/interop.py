"""To and from torch's own ``torch.distributed.tensor.DTensor``: the same local tensor, no copy, gradients both ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hp_dtensor.base import DTensorBase
from hp_dtensor.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_platform import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor as TorchDTensor

_REDUCTIONS = {"sum": "sum", "avg": "avg", "max": "max", "min": "min", "prod": "product"}


class InteropMethods(DTensorBase):
    """Exchange with torch's own DTensor."""

    if TYPE_CHECKING:
        stride: Any
        from_local: Any

    def to_torch(self) -> TorchDTensor:
        """This tensor as one of torch's: the same local tensor, the gradient flows back.

        Its mesh is over the same process groups. Communication: none; but on a mesh with a dim of size 1 the first call makes
        torch's groups, so all ranks of the world must call. ValueError for a RaggedShard and for reductions that torch has not.
        """
        from torch.distributed.tensor import DTensor as TorchDTensor

        return TorchDTensor.from_local(
            self._local,
            _to_torch_mesh(self._spec.mesh),
            [_to_torch(p) for p in self._spec.placements],
            run_check=False,
            shape=torch.Size(self._spec.shape),
            stride=self.stride(),
        )

    @classmethod
    def from_torch(cls, tensor: TorchDTensor) -> Any:
        """One of torch's as one of ours: the same local tensor, the gradient flows back. Communication: none."""
        from torch.distributed.tensor import DTensor as TorchDTensor

        if not isinstance(tensor, TorchDTensor):
            raise ValueError(
                f"from_torch takes a torch.distributed.tensor.DTensor, got {type(tensor).__name__}: for a plain tensor use "
                f"from_local or distribute_tensor"
            )
        placements = [_from_torch(p) for p in tensor.placements]
        mesh = _from_torch_mesh(tensor.device_mesh)
        return cls.from_local(tensor.to_local(), mesh, placements, shape=tuple(tensor.shape))


def _to_torch(placement: Placement) -> Any:
    from torch.distributed import tensor as theirs
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, StridedShard):
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    if isinstance(placement, Shard):
        return theirs.Shard(placement.dim)
    if isinstance(placement, Replicate):
        return theirs.Replicate()
    reduction = _REDUCTIONS.get(placement.reduce_op) if isinstance(placement, Partial) else None
    if isinstance(placement, RaggedShard) or reduction is None:
        raise ValueError(
            f"torch's own DTensor has no {placement}: redistribute to Shard, Replicate or Partial() first"
        )
    return theirs.Partial(reduction)


def _from_torch(placement: Any) -> Placement:
    from torch.distributed import tensor as theirs
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, _StridedShard):
        return StridedShard(placement.dim, placement.split_factor)
    if isinstance(placement, theirs.Shard):
        return Shard(placement.dim)
    if isinstance(placement, theirs.Replicate):
        return Replicate()
    ours = {value: key for key, value in _REDUCTIONS.items()}.get(str(getattr(placement, "reduce_op", "")))
    # Subclasses of Partial mean something else.
    if type(placement) is not theirs.Partial or ours is None:
        raise ValueError(
            f"hp_dtensor has no placement like torch's {placement!r}: redistribute the tensor first"
        )
    return Partial(ours)


def _to_torch_mesh(mesh: Any) -> Any:
    """Made once per mesh, over the groups of the mesh where each dim has one."""
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    found = mesh.interned.get("torch")
    if found is None:
        names, ranks = mesh.mesh_dim_names, torch.tensor(_nested(mesh))
        if names is None and len(mesh.shape) > 1:  # torch asks for names where groups are given
            names = tuple(f"dim_{dim}" for dim in range(len(mesh.shape)))
        groups = [mesh.get_group(dim).native for dim in range(len(mesh.shape))]
        if None in groups:
            found = TorchMesh(mesh.device_type, ranks, mesh_dim_names=names)
        else:
            found = TorchMesh.from_group(
                groups[0] if len(groups) == 1 else groups, mesh.device_type, ranks, mesh_dim_names=names
            )
        found._hp_mesh = mesh
        mesh.interned["torch"] = found
    return found


def _from_torch_mesh(theirs: Any) -> DeviceMesh:
    """Over torch's groups; the same object for the same mesh, and what it was made of where it was ours."""
    mesh: DeviceMesh | None = getattr(theirs, "_hp_mesh", None)
    if mesh is None:
        mesh = DeviceMesh.from_group(
            theirs.get_all_groups(), theirs.device_type, theirs.mesh, mesh_dim_names=theirs.mesh_dim_names
        )
        mesh.interned["torch"], theirs._hp_mesh = theirs, mesh
    return mesh


def _nested(mesh: Any) -> Any:
    return mesh.mesh.tolist() if hasattr(mesh.mesh, "tolist") else mesh.mesh
