"""A gradient may be given on a mesh that equals that of its tensor, as meshes of sharded modules equal those they were made of."""

from __future__ import annotations

import numpy as np
import pytest

from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_dtensor.storage_mesh import storage_mesh
from hp_platform import init_device_mesh
from hp_platform.testing import World, distributed


@distributed(world_size=(2, 3))
def test_a_gradient_on_an_equal_mesh_is_that_of_the_tensor(world: World) -> None:
    platform = world.platform
    mesh = init_device_mesh(world.device_type, (world.size,), mesh_dim_names=("dp",))
    meshes = [storage_mesh(mesh, "as parameters of sharded modules lie"), mesh]
    assert meshes[0] == meshes[1]
    assert meshes[0] is not meshes[1]
    x = distribute_tensor(platform.full((5,), 1.0, "float32", world.device), meshes[0], [Shard(0)])
    x.requires_grad_(True)
    values = np.arange(5, dtype="float32")
    gradient = platform.tensor(values, "float32", world.device)
    x.grad = distribute_tensor(gradient, meshes[1], [Shard(0)])
    assert x.grad.device_mesh is meshes[0]
    np.testing.assert_array_equal(platform.to_numpy(x.grad.full_tensor()), values)
    with pytest.raises(ValueError, match="the gradient must be a DTensor of"):
        x.grad = distribute_tensor(gradient, meshes[1], [Replicate()])
