"""Exchange with torch's own DTensor: the same memory, values, placements and gradients."""

import pytest
import torch

from hp_dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from hp_dtensor.placements import StridedShard
from hp_platform import init_device_mesh
from hp_platform.testing import World, assert_parity, count_collectives, distributed

PAIRS: list[tuple[Placement, ...]] = [
    (Shard(0), Replicate()),
    (Shard(1), Shard(0)),
    (Replicate(), Partial()),
    (Partial("avg"), Shard(1)),
    (Shard(0), Shard(0)),
    (StridedShard(0, 2), Shard(0)),
]


def _whole(world: World) -> torch.Tensor:
    return torch.arange(15.0, dtype=torch.float64, device=world.device).reshape(5, 3)


@pytest.mark.parametrize("at", PAIRS, ids=str)
@distributed(4, backends=["torch", "cuda"])
def test_tensors_go_to_torch_and_back_without_a_copy(world: World, at: tuple[Placement, ...]) -> None:
    mesh = init_device_mesh(world.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    x = distribute_tensor(_whole(world), mesh, at)
    with count_collectives() as counted:
        theirs = x.to_torch()
        again = DTensor.from_torch(theirs)
    counted.assert_counts()
    assert theirs.to_local().data_ptr() == again.to_local().data_ptr() == x.to_local().data_ptr()
    assert again._spec is x._spec and theirs.stride() == x.stride() and theirs.shape == x.shape
    assert theirs.device_mesh is x.to_torch().device_mesh and theirs.device_mesh.mesh_dim_names == (
        "dp",
        "tp",
    )
    assert_parity(theirs.full_tensor(), _whole(world), exact=True)


@distributed(2, backends=["torch", "cuda"])
def test_gradients_flow_through_both_ways(world: World) -> None:
    mesh = init_device_mesh(world.device_type, (2,))
    for at in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(_whole(world), mesh, [at]).requires_grad_()
        back = DTensor.from_torch(x.to_torch() * 3)
        (back * back).sum().backward()
        assert x.grad.placements == (at,)
        # Whole numbers.
        assert_parity(x.grad, _whole(world) * 18, exact=True, name=str(at))


@distributed(2, backends=["torch", "cuda"])
def test_a_mesh_of_torch_becomes_one_of_ours_once(world: World) -> None:
    from torch.distributed import tensor as oracle

    theirs = torch.distributed.init_device_mesh(world.device_type, (2,), mesh_dim_names=("x",))
    x = oracle.distribute_tensor(_whole(world), theirs, [oracle.Shard(0)])
    ours = DTensor.from_torch(x)
    assert ours.device_mesh is DTensor.from_torch(x * 2).device_mesh and ours.to_torch().device_mesh is theirs
    assert_parity(ours * 2, _whole(world) * 2, exact=True)
    with pytest.raises(ValueError, match=r"from_torch takes a torch.distributed.tensor.DTensor, got Tensor"):
        DTensor.from_torch(_whole(world))
    with pytest.raises(ValueError, match="torch's own DTensor has no"):
        DTensor.from_local(_whole(world) > 1, ours.device_mesh, [Partial("any")]).to_torch()
