"""Wrong calls of ``fully_shard``: modules and meshes."""

from __future__ import annotations

from typing import Any

from fsdp_models import make_mesh
from refused_calls import Call, Model, shard

from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from hp_platform import init_device_mesh
from hp_platform.testing import World


def set_gradient(world: World, model: Model) -> None:
    weight = model.blocks[1].inner.weight
    world.platform.set_grad(weight, world.platform.zeros_like(world.platform.detach(weight)))


def set_same_memory(world: World, model: Model) -> None:
    """A tie that is none: another parameter over the memory of one."""
    weight = world.platform.detach(model.blocks[0].inner.weight)
    world.platform.set_parameter(model.blocks[1].inner, "weight", world.platform.parameter(weight))


def set_dtensor(world: World, model: Model, mesh: Any) -> None:
    """Let the head's weight be one."""
    weight = distribute_tensor(world.platform.detach(model.head.weight), mesh, [Replicate()])
    world.platform.set_parameter(model.head, "weight", world.platform.parameter(weight))


def set_dtensors(world: World, model: Model) -> None:
    """Let all parameters be such."""
    mesh = make_mesh(world)
    for _, module in world.platform.named_modules(model):
        for name, parameter in list(world.platform.named_parameters(module, recurse=False)):
            whole = distribute_tensor(world.platform.detach(parameter), mesh, [Replicate()])
            world.platform.set_parameter(module, name, world.platform.parameter(whole))


CALLS: dict[str, Call] = {
    # --- what is sharded
    "no module": Call(
        lambda world, model: fully_shard(model.head.weight), r"fully_shard takes a module of \w+, got \w+"
    ),
    "a list with something that is no module": Call(
        lambda world, model: fully_shard([model.head, "head"]),
        r"fully_shard takes a module of \w+, got str at index 1",
    ),
    "an empty list": Call(
        lambda world, model: fully_shard([]), r"a module or a list of modules, got an empty list"
    ),
    "a list of modules without forward": Call(
        lambda world, model: fully_shard(model.blocks),
        r"a ModuleList has no forward, .*call fully_shard on each of its modules, or on the module that it hangs in",
    ),
    "twice": Call(shard, r"HSDPModel is sharded already: call fully_shard once per module", before=shard),
    "in a list, once more": Call(
        lambda world, model: fully_shard([model.head, model.blocks[0]], make_mesh(world)),
        r"HSDPLinear is sharded already: call fully_shard once per module",
        before=lambda world, model: fully_shard(model.head, make_mesh(world)),
    ),
    "inner module after the outer one": Call(
        lambda world, model: fully_shard(model.head, make_mesh(world)),
        r"parameter 'weight' of Linear is sharded by another unit already, Model as 'head\.weight', .*inner modules first",
        before=shard,
    ),
    "parameter with a gradient": Call(
        shard,
        r"parameter 'blocks\.1\.inner\.weight' of Model has a gradient of its whole shape: clear it",
        before=set_gradient,
    ),
    "two parameters in one memory": Call(
        shard,
        r"parameters 'blocks\.0\.inner\.weight' and 'blocks\.1\.inner\.weight' are two that lie in the same memory, .*be one parameter",
        before=set_same_memory,
    ),
    # --- the mesh
    "mesh that is none": Call(
        lambda world, model: fully_shard(model, world.group),
        r"mesh must be a hp_platform\.DeviceMesh or None, got ProcessGroup: make one with init_device_mesh",
    ),
    "mesh by its shape": Call(
        lambda world, model: fully_shard(model, (2,)),
        r"mesh must be a hp_platform\.DeviceMesh or None, got tuple",
    ),
    "mesh with three dims": Call(
        lambda world, model: fully_shard(model, init_device_mesh(world.device_type, (1, 1, 2))),
        r"takes a 1-D mesh \(shard\) or a 2-D mesh \(replicate, shard\), got 3 dims of sizes \(1, 1, 2\)",
    ),
    "mesh in descending order": Call(
        lambda world, model: fully_shard(model, init_device_mesh(world.device_type, (2,), rank_list=[1, 0])),
        r"the ranks along dim 0 of the mesh must ascend, got \[1, 0\]",
    ),
    "DTensors and others without a mesh": Call(
        lambda world, model: fully_shard(model),
        r"'head\.weight' of Model is a DTensor and 'blocks\.0\.inner\.weight' is not: give the mesh to shard over",
        before=lambda world, model: set_dtensor(world, model, make_mesh(world)),
    ),
    **{
        f"{name} for DTensors that stay": Call(
            lambda world, model, kwargs=kwargs: fully_shard(model, **kwargs),
            rf"'blocks\.0\.inner\.weight' of Model is a DTensor and stays as it is, .*so {said} does not reach it: give the mesh",
            before=set_dtensors,
        )
        for name, said, kwargs in (
            (
                "precision",
                r"mp_policy\.param_dtype",
                {"mp_policy": MixedPrecisionPolicy(param_dtype="float16")},
            ),
            ("offloading", "offload_policy", {"offload_policy": CPUOffloadPolicy()}),
            ("another dim", "shard_placement_fn", {"shard_placement_fn": lambda parameter: Shard(0)}),
        )
    },
    "a DTensor on a mesh without names": Call(
        shard,
        r"'head\.weight' of Model is a DTensor on .*cut both out of one mesh with named dims",
        before=lambda world, model: set_dtensor(world, model, make_mesh(world)),
    ),
    "a DTensor on the very mesh": Call(
        lambda world, model: fully_shard(
            model, init_device_mesh(world.device_type, (2,), mesh_dim_names=("dp",))
        ),
        r"'head\.weight' of Model is a DTensor on .*cut both out of one mesh with named dims",
        before=lambda world, model: set_dtensor(
            world, model, init_device_mesh(world.device_type, (2,), mesh_dim_names=("dp",))
        ),
    ),
}
